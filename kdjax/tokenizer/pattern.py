"""Kimi's pre-tokenisation: the split pattern, and the guard that keeps very long inputs linear."""

from __future__ import annotations

import re
from collections.abc import Iterator

_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

SPLIT = "|".join(
    [
        r"[\p{Han}]+",
        f"{_PREFIX}{_UPPER}*{_LOWER}+{_SUFFIX}",
        f"{_PREFIX}{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

MAX_CHARS = 400_000
MAX_RUN = 25_000
_LONG_RUN = re.compile(rf"\s{{{MAX_RUN + 1},}}|\S{{{MAX_RUN + 1},}}")


def chunks(text: str) -> Iterator[str]:
    """Cut `text` every 400,000 characters and every 25,000 characters of one space / non-space run.

    The cuts are those of Moonshot's wrapper, so the ids of long inputs agree with it. Their purpose: the regex engine
    behind tiktoken backtracks, and may overflow its stack, on one enormous run.
    """
    for start in range(0, len(text), MAX_CHARS):
        part = text[start : start + MAX_CHARS]
        cut = 0
        for run in _LONG_RUN.finditer(part):
            for stop in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield part[cut:stop]
                cut = stop
        yield part[cut:]
