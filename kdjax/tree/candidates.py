"""The static candidate set of DDTree: the rank tuples that can be among the best B whatever the drafter says.

A tuple is dominated by every tuple that is no longer and has no larger rank anywhere. With 1-based ranks r there are
sum_j prod_{i<=j} r_i of those, itself included, so a tuple can be in the tree only if that sum is at most B.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from kdjax.errors import KdjaxError

MAX_DEPTH = 15
MAX_CANDIDATES = 100_000


class Candidates(NamedTuple):
    """Rank tuples in lexicographic order, a prefix before its extensions: the order that breaks ties of the score.

    `ranks` is 0-based, -1 past the end of a tuple. `ancestors[c, d]` is the candidate that is c cut to depth d + 1
    (c itself at its own depth), -1 below it.
    """

    ranks: Int[np.ndarray, "candidates depth"]
    depths: Int[np.ndarray, "candidates"]
    parents: Int[np.ndarray, "candidates"]
    ancestors: Int[np.ndarray, "candidates depth"]


def check_budget(depth: int, budget: int, top: int) -> None:
    """What a decoder, or a plan of one, accepts: trees of `budget` nodes, `depth` levels and `top` tokens per level.

    Raises KdjaxError where the set would be too large to sort every round, or deeper than the score keys hold.
    """
    if depth > MAX_DEPTH:
        raise KdjaxError(f"draft depth {depth} exceeds {MAX_DEPTH}: use a drafter with block_size <= {MAX_DEPTH + 1}")
    if not _fits(depth, budget, top):
        # a tree of b nodes is made of b candidates at least
        tried = range(1, min(budget, MAX_CANDIDATES + 1))
        largest = bisect.bisect_left(tried, True, key=lambda b: not _fits(depth, b, top))
        raise KdjaxError(
            f"tree budget {budget} at depth {depth} needs more than {MAX_CANDIDATES} candidates: "
            f"lower it to at most {largest}"
        )


@functools.lru_cache(maxsize=64)
def candidates(depth: int, budget: int, top: int) -> Candidates:
    """Candidates for trees of up to `budget` nodes, `depth` levels and `top` tokens per level.

    Raises KdjaxError like `check_budget`.
    """
    check_budget(depth, budget, top)
    tuples = list(_tuples(depth, budget, top))
    ranks, lineages = [prefix for prefix, _ in tuples], [lineage for _, lineage in tuples]
    table = np.full((len(ranks), depth), -1, np.int32)
    ancestors = np.full((len(ranks), depth), -1, np.int32)
    for c, (prefix, lineage) in enumerate(zip(ranks, lineages, strict=True)):
        table[c, : len(prefix)] = prefix
        ancestors[c, : len(lineage)] = lineage
    depths = (table >= 0).sum(-1, dtype=np.int32)
    parents = np.array([lineage[-2] if len(lineage) > 1 else -1 for lineage in lineages], np.int32)
    for array in (table, depths, parents, ancestors):
        array.setflags(write=False)  # shared by every caller through the cache
    return Candidates(table, depths, parents, ancestors)


def _tuples(depth: int, budget: int, top: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Rank tuples in lexicographic order, each with the numbers of its prefixes, itself last."""
    # Depth-first with an explicit stack, children pushed last rank first: pre-order is the lexicographic order.
    stack: list[tuple[tuple[int, ...], tuple[int, ...], int, int]] = [((), (), 1, 0)]
    number = 0
    while stack:
        prefix, lineage, product, total = stack.pop()
        if prefix:
            lineage = (*lineage, number)
            number += 1
            yield prefix, lineage
        if len(prefix) < depth:
            widest = min((budget - total) // product, top)
            stack.extend(
                ((*prefix, r), lineage, product * (r + 1), total + product * (r + 1)) for r in reversed(range(widest))
            )


def _fits(depth: int, budget: int, top: int) -> bool:
    return next(itertools.islice(_tuples(depth, budget, top), MAX_CANDIDATES, None), None) is None
