r"""When two answers of MATH are the same: by a normal form of their LaTeX, or by math-verify where it is installed."""

from __future__ import annotations

import re
from importlib import metadata, util

from kdjax.errors import KdjaxError

VERIFIER = "math-verify"

_DROPPED = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\(?:quad|qquad|displaystyle)(?![a-z])|\\\$|\$|\\%|%|~"
    r"|\^\{?\\circ\}?|\\degree|°"
)
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}")
_NAME = re.compile(r"^[a-zA-Z](?:\([a-z]\))?\s*=(?!=)\s*")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")
_SYNONYMS = {"\\tfrac": "\\frac", "\\dfrac": "\\frac", "\\cfrac": "\\frac", "\\leq": "\\le", "\\geq": "\\ge"}
_SYNONYMS |= {"\\neq": "\\ne", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\ldots": "\\dots", "\\cdots": "\\dots"}


def normal_form(answer: str) -> str:
    r"""The answer without what does not change its value: spaces, `$`, units, `\left`, `x =`, thousands commas.

    Fractions are written `\frac{a}{b}` and roots `\sqrt{a}`; `0.` is put before `.5`; a trailing period goes.
    """
    text = answer.strip().rstrip(".").strip()
    for name, other in _SYNONYMS.items():
        text = re.sub(re.escape(name) + r"(?![a-zA-Z])", lambda _, other=other: other, text)
    text = _without_unit(text.replace("{,}", ","))
    text = _DROPPED.sub("", _TEXT.sub(r"\1", text))
    text = _NAME.sub("", text.strip())
    text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    text = re.sub(r"\\sqrt(?=[^{\[\\])(.)", r"\\sqrt{\1}", text)
    text = _fractions(text)
    return text.rstrip(".")


def _without_unit(text: str) -> str:
    r"""`5\text{ cm}^2` is 5; a `\text{...}` with nothing before it is the answer itself."""
    match = re.search(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?\s*$", text)
    before = text[: match.start()].rstrip(" \\,~") if match else ""
    return before if re.search(r"[\d})]$", before) else text


def _fractions(text: str) -> str:
    r"""`\frac12`, `\frac1{2}` and `1/2` as `\frac{1}{2}`."""
    argument = r"(\{[^{}]*\}|[^{}\\])"
    text = re.sub(
        rf"\\frac{argument}{argument}",
        lambda m: "\\frac" + "".join(f"{{{part.strip('{}')}}}" for part in m.groups()),
        text,
    )
    return re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)


def verifier(wanted: str) -> str | None:
    """Name and version of the library that compares what the normal forms leave open; None where none is used.

    Raises KdjaxError where it is wanted by name and not installed.
    """
    if wanted == "none":
        return None
    if util.find_spec("math_verify") is None:
        if wanted == VERIFIER:
            raise KdjaxError(
                f'verifier = {VERIFIER!r} is not installed: pip install "kdjax[eval]", or verifier = "none"'
            )
        return None
    return f"{VERIFIER} {metadata.version(VERIFIER)}"


def is_equivalent(answer: str, expected: str) -> bool:
    """By math-verify, which must be installed. What it cannot read is not equivalent."""
    import math_verify  # pyright: ignore[reportMissingImports]

    gold, found = (math_verify.parse(f"${text}$") for text in (expected, answer))
    return bool(math_verify.verify(gold, found))
