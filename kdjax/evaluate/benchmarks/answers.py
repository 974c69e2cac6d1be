"""Finds the answer in what a model wrote."""

from __future__ import annotations

import re

NUMBER = re.compile(r"(?:(?<![\w)\]}])-|\$-)?\$?(?:\d[\d,]*(?:\.\d+)?|(?<!\d)\.\d+)")
"""A minus directly behind a word, a digit or a bracket is a dash: the second number of `3-5` is 5."""

MARKED = re.compile(r"#### (-?[0-9.,]+)")
"""GSM8K's own mark, as lm-evaluation-harness reads it."""

OPEN, CLOSE = "<think>", "</think>"


def without_thinking(text: str, *, thinking: bool) -> str | None:
    """What follows the reasoning; None where the reasoning never ended. `thinking`: the prompt has opened it."""
    if thinking:
        text = OPEN + text
    before, opened, _ = text.rpartition(OPEN)
    after = text.rpartition(CLOSE)
    if opened and len(after[0]) <= len(before):
        return None
    return after[2] if opened else text


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}`, braces matched; None without any."""
    found = None
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
        content = _to_closing_brace(text, match.end())
        if content is not None:
            found = content
    return found


def _to_closing_brace(text: str, start: int) -> str | None:
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
        at += 1
    return None


def last_number(text: str) -> str | None:
    """The last number of the text, as `plain_number` writes it; None without any."""
    numbers = [match.group() for match in NUMBER.finditer(text)]
    return plain_number(numbers[-1]) if numbers else None


def marked_number(text: str) -> str | None:
    """The number after the last `#### `, as `plain_number` writes it; None without any."""
    marked = MARKED.findall(text)
    return plain_number(marked[-1]) if marked else None


def plain_number(text: str) -> str:
    """Without `,`, `$` and a trailing `.`, the rule of GSM8K in lm-evaluation-harness."""
    return re.sub(r"\.$", "", text.strip().replace("\\$", "").replace("$", "").replace(",", ""))
