"""Finds the program in what a model wrote, and the share of samples that pass."""

from __future__ import annotations

import math
import re

_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def last_block(text: str, containing: str = "") -> str | None:
    """The last fenced block with `containing` in it, else the last block; None without any. It may be unclosed."""
    blocks = _FENCED.findall(text)
    fitting = [block for block in blocks if containing in block]
    return (fitting or blocks or [None])[-1]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k samples passes, unbiased: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, eq. 1).

    Raises ValueError unless 1 <= k <= samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} must lie in 1 to the {samples} samples")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)
