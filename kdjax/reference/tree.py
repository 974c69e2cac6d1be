"""DDTree: the best-scoring draft tree of a fixed number of nodes (Ringel & Romano, arXiv 2604.12989, section 3).

A node is a rank tuple (r1 .. rd): at draft depth i it takes the ri-th most likely token. Its score is the sum of the
log-probabilities lp[i, ri]. The tree of budget B is the first B tuples by (score descending, tuple ascending, prefix
before extension); `heap_tree` finds them as the paper does, `ordered_tree` straight from that definition.
"""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int


class Tree(NamedTuple):
    """Row 0 of `parents`, `depths` and the verify forward is the root; `tokens[i]` belongs to row i + 1."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]
    ranks: list[tuple[int, ...]]


def marginals(
    logits: Float[np.ndarray, "depth vocab"], top: int
) -> tuple[Float32[np.ndarray, "depth top"], Int[np.ndarray, "depth top"]]:
    """Log-probabilities and ids of the `top` most likely tokens per depth, lowest id first among equal logits.

    lp = float32(logit) - float32(logsumexp): both operands are rounded before the subtraction, as in the paper's code,
    so that sums of lp are (nearly always) exact and ties between nodes stay ties.
    """
    ids = np.argsort(-logits.astype(np.float64), axis=-1, kind="stable")[:, : min(top, logits.shape[1])]
    wide = logits.astype(np.float64)
    peak = wide.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        normaliser = np.log(np.exp(wide - peak).sum(-1, keepdims=True)) + peak
        lp = np.take_along_axis(logits, ids, -1).astype(np.float32) - normaliser.astype(np.float32)
    if not np.isfinite(normaliser).all():  # a row without a distribution is a broken draft: no node of it is trusted
        lp = np.full_like(lp, np.nan)
    return lp, ids


def heap_tree(lp: Float32[np.ndarray, "depth top"], ids: Int[np.ndarray, "depth top"], budget: int) -> Tree:
    """Best-first search of the paper's algorithm 1, with scores summed in float64 and rank tuples breaking ties.

    A node with a non-finite score (NaN or -inf log-probability) is never taken, nor anything below it.
    """
    depth, top = lp.shape
    heap: list[tuple[float, tuple[int, ...]]] = []

    def push(score: float, ranks: tuple[int, ...]) -> None:
        if np.isfinite(score):
            heapq.heappush(heap, (-score, ranks))

    if depth and top:
        push(float(lp[0, 0]), (0,))
    chosen: list[tuple[float, tuple[int, ...]]] = []
    while heap and len(chosen) < budget:
        negative, ranks = heapq.heappop(heap)
        score, d, r = -negative, len(ranks), ranks[-1]
        chosen.append((score, ranks))
        if r + 1 < top:
            push(score - float(lp[d - 1, r]) + float(lp[d - 1, r + 1]), (*ranks[:-1], r + 1))
        if d < depth:
            push(score + float(lp[d, 0]), (*ranks, 0))
    return _number(chosen, ids)


def candidates(depth: int, budget: int) -> list[tuple[int, ...]]:
    """Every rank tuple that can be among the best `budget`, whatever the log-probabilities, in ascending order.

    A tuple is preceded by all tuples no longer than it with no larger rank anywhere: the sum over its prefixes of the
    product of (rank + 1). More than `budget` of those, itself included, and it can never be chosen.
    """

    def below(prefix: tuple[int, ...], product: int, total: int) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        if len(prefix) < depth:
            for rank in itertools.takewhile(lambda r: total + product * (r + 1) <= budget, itertools.count()):
                wider = product * (rank + 1)
                found += [(*prefix, rank), *below((*prefix, rank), wider, total + wider)]
        return found

    return below((), 1, 0)


def ordered_tree(lp: Float32[np.ndarray, "depth top"], ids: Int[np.ndarray, "depth top"], budget: int) -> Tree:
    """The same tree from the definition: sort the candidates by (-score, ranks) and keep the first `budget`."""
    depth, top = lp.shape
    scored = [
        (sum(float(lp[i, r]) for i, r in enumerate(ranks)), ranks)
        for ranks in candidates(depth, budget)
        if max(ranks) < top
    ]
    finite = [(score, ranks) for score, ranks in scored if np.isfinite(score)]
    return _number(sorted(finite, key=lambda item: (-item[0], item[1]))[:budget], ids)


def chain(logits: Float[np.ndarray, "depth vocab"]) -> Tree:
    """Plain DFlash: the most likely token of every depth, one path."""
    lp, ids = marginals(logits, 1)
    return _number(list(zip(np.cumsum(lp[:, 0], dtype=np.float64).tolist(), _prefixes(len(lp)), strict=True)), ids)


def _prefixes(depth: int) -> list[tuple[int, ...]]:
    return [(0,) * d for d in range(1, depth + 1)]


def _number(chosen: list[tuple[float, tuple[int, ...]]], ids: np.ndarray) -> Tree:
    row = {(): 0} | {ranks: i + 1 for i, (_, ranks) in enumerate(chosen)}
    ranks = [ranks for _, ranks in chosen]
    return Tree(
        tokens=[int(ids[len(r) - 1, r[-1]]) for r in ranks],
        parents=[-1] + [row[r[:-1]] for r in ranks],
        depths=[0] + [len(r) for r in ranks],
        scores=[score for score, _ in chosen],
        ranks=ranks,
    )


def visibility(parents: list[int]) -> Bool[np.ndarray, "rows rows"]:
    """Ancestor mask: row i sees row j where j is i itself or one of its ancestors (parents come before children)."""
    sees = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            sees[i] |= sees[parent]
    return sees


def position_ids(tree: Tree, start: int) -> Int[np.ndarray, "rows"]:
    """Absolute positions of root and nodes: siblings share one."""
    return start + np.asarray(tree.depths)
