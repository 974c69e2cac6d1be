"""The verification walk (DDTree paper, section 3.3): follow the target's own tokens through the tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Acceptance(NamedTuple):
    """`rows` are the accepted rows of the verify forward, root first; `bonus` is the target's token after the last."""

    rows: list[int]
    bonus: int


def accept(tokens: Sequence[int], parents: Sequence[int], posterior: Sequence[int]) -> Acceptance:
    """Walks from the root while the target's token at the current row is one of its children.

    `tokens[i]` is the token of row i + 1, `parents` (root = -1) and `posterior`, the target's choice, have one entry
    per row. Children of a row always carry different tokens, so at most one matches.
    """
    child = {(parent, token): row for row, (parent, token) in enumerate(zip(parents[1:], tokens, strict=True), start=1)}
    rows = [0]
    while (row := child.get((rows[-1], int(posterior[rows[-1]])))) is not None:
        rows.append(row)
    return Acceptance(rows, int(posterior[rows[-1]]))
