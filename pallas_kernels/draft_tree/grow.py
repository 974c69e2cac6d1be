"""DDTree's best-first search (Ringel & Romano, arXiv 2604.12989) in one program per slot.

The frontier needs no heap. What can be popped next below a row is its first child that is not in the tree yet: the
siblings after it follow in order, and its own children only once it is there. So the frontier has one entry per row,
and a step is a lexicographic minimum over the rows, by exact cost, then by the ranks of the path.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.draft_tree.fixed_point import LIMB_BITS, LIMB_MASK, LIMBS, limbs

MOST_NODES = 126
"""Ranks, counted from one, have a byte each in the key of a path, and the highest byte has no sign bit to spare."""
MOST_LEVELS = 15
_WORD_BITS, _RANK_BITS = 32, 8
_RANKS_PER_WORD = _WORD_BITS // _RANK_BITS
_IMPOSSIBLE = 2**31 - 1


class Grown(NamedTuple):
    """Rows of the tree, root first, in the order in which they were found; `n_valid` of them are in use.

    Padding: token 0, depth 0, parent -1, score -inf, seen by itself alone.
    """

    tokens: Int32[Array, "slots rows"]
    depths: Int32[Array, "slots rows"]
    parents: Int32[Array, "slots rows"]
    ancestors: Bool[Array, "slots rows rows"]
    scores: Float32[Array, "slots rows"]
    n_valid: Int32[Array, "slots"]


def grow(
    lp: Float32[Array, "slots depth top"],
    ids: Int32[Array, "slots depth top"],
    roots: Int32[Array, "slots"],
    limit: Int32[Array, "slots"] | None,
    *,
    budget: int,
    interpret: bool,
) -> Grown:
    """The trees of the `limit` best nodes, `budget` at most and without a limit; log-probabilities fall along `top`.

    A slot with a NaN, or a depth whose first log-probability is not finite, has the root alone.

    Raises:
        ValueError: more than MOST_NODES nodes or MOST_LEVELS levels.
    """
    slots, depth, _ = lp.shape
    if budget > MOST_NODES or depth > MOST_LEVELS:
        raise ValueError(
            f"grow: {budget} nodes of {depth} levels are too many: at most {MOST_NODES} of {MOST_LEVELS} levels"
        )
    row = jax.ShapeDtypeStruct((slots, 1 + budget), jnp.int32)
    return Grown(
        *pl.pallas_call(
            functools.partial(_grow, budget=budget),
            grid=(slots,),
            out_shape=(
                row,
                row,
                row,
                jax.ShapeDtypeStruct((*row.shape, 1 + budget), jnp.bool_),
                jax.ShapeDtypeStruct(row.shape, jnp.float32),
                jax.ShapeDtypeStruct((slots,), jnp.int32),
            ),
            # a step is a chain of reductions: within one warp they need no barrier
            compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
            name="grow_draft_tree",
        )(lp, ids, roots, *(() if limit is None else (limit,)))
    )


class _Rows(NamedTuple):
    """One entry per row: the row itself, and the child of it that is next to be found."""

    tokens: Array
    depths: Array
    parents: Array
    scores: Array
    costs: tuple[Array, ...]  # limbs
    ranks: tuple[Array, ...]  # of the path, one byte per level, 0 beyond it
    ancestors: tuple[Array, ...]  # words of bits
    next_rank: Array
    next_costs: tuple[Array, ...]


def _grow(lp, ids, roots, *refs, budget):
    *limit, tokens, depths, parents, ancestors, scores, n_valid = refs
    slot, depth, top = pl.program_id(0), lp.shape[1], lp.shape[2]
    size = max(_WORD_BITS, pl.next_power_of_2(1 + budget))
    row = jnp.arange(size, dtype=jnp.int32)

    def child_costs(costs, level, rank):
        """Costs of a row, with that of its child of this rank added; impossible where there is none."""
        exists = (level < depth) & (rank < top)
        value = lp[slot, jnp.minimum(level, depth - 1), jnp.minimum(rank, top - 1)]
        sums, carry = [], jnp.int32(0)
        for a, b in zip(costs[::-1], limbs(value)[::-1], strict=True):
            total = a + b.astype(jnp.int32) + carry
            sums.append(total & np.int32(LIMB_MASK))
            carry = total >> LIMB_BITS
        # nothing is carried out of the highest limb
        possible = exists & (value > -np.inf)
        return (jnp.where(possible, sums[-1], _IMPOSSIBLE), *sums[-2::-1])

    def step(_, carry):
        rows, n = carry
        level, rank = rows.depths, rows.next_rank
        byte = (rank + 1) << (_RANK_BITS * (_RANKS_PER_WORD - 1 - level % _RANKS_PER_WORD))
        paths = [w | jnp.where(level // _RANKS_PER_WORD == i, byte, 0) for i, w in enumerate(rows.ranks)]

        def first(best, keys):
            for key in keys:
                key = jnp.where(best != 0, key, _IMPOSSIBLE)
                best = jnp.where(key == jnp.min(key), best, 0)
            return best

        best = first(jnp.ones((size,), jnp.int32), rows.next_costs[:2])
        # two limbs hardly ever tie
        best = lax.cond(jnp.sum(best) > 1, lambda: first(best, (*rows.next_costs[2:], *paths)), lambda: best)

        def of(values):
            return jnp.sum(jnp.where(best != 0, values, jnp.zeros_like(values)))

        found = of(jnp.where(rows.next_costs[0] == _IMPOSSIBLE, 1, 0)) == 0
        parent, level, rank = of(row), of(level), of(rank)
        own = jnp.minimum(level, depth - 1), jnp.minimum(rank, top - 1)
        costs = tuple(map(of, rows.next_costs))
        parent_costs = tuple(map(of, rows.costs))
        new = found & (row == n)
        old = found & (best != 0)

        def put(values, value):
            return jnp.where(new, value, values)

        further = child_costs(costs, level + 1, jnp.int32(0)), child_costs(parent_costs, level, rank + 1)
        rows = _Rows(
            tokens=put(rows.tokens, ids[slot, own[0], own[1]]),
            depths=put(rows.depths, level + 1),
            parents=put(rows.parents, parent),
            scores=put(rows.scores, of(rows.scores) + lp[slot, own[0], own[1]]),
            costs=tuple(map(put, rows.costs, costs)),
            ranks=tuple(put(a, of(b)) for a, b in zip(rows.ranks, paths, strict=True)),
            # every row already sees itself
            ancestors=tuple(jnp.where(new, a | of(a), a) for a in rows.ancestors),
            next_rank=jnp.where(old, rank + 1, rows.next_rank),
            next_costs=tuple(
                jnp.where(old, sibling, put(a, child))
                for a, child, sibling in zip(rows.next_costs, *further, strict=True)
            ),
        )
        return rows, n + found.astype(jnp.int32)

    nothing = jnp.zeros((size,), jnp.int32)
    root_costs = child_costs((jnp.int32(0),) * LIMBS, jnp.int32(0), jnp.int32(0))
    rows = _Rows(
        tokens=jnp.where(row == 0, roots[slot], 0),
        depths=nothing,
        parents=nothing - 1,
        scores=jnp.where(row == 0, np.float32(0), np.float32(-np.inf)),
        costs=(nothing,) * LIMBS,
        ranks=(nothing,) * -(-depth // _RANKS_PER_WORD),
        ancestors=tuple(
            jnp.where(row // _WORD_BITS == i, jnp.int32(1) << (row % _WORD_BITS), 0) for i in range(size // _WORD_BITS)
        ),
        next_rank=nothing,
        next_costs=tuple(jnp.where(row == 0, cost, _IMPOSSIBLE if i == 0 else 0) for i, cost in enumerate(root_costs)),
    )
    level, rank = (jnp.arange(pl.next_power_of_2(n), dtype=jnp.int32) for n in (depth, top))
    inside = (level < depth)[:, None] & (rank < top)[None, :]
    table = plgpu.load(lp.at[slot, level[:, None], rank[None, :]], mask=inside, other=0.0)
    broken = (table != table) | ((rank == 0)[None, :] & (jnp.abs(table) == np.inf))
    count = jnp.minimum(limit[0][slot], budget) if limit else jnp.int32(budget)
    count = jnp.where(jnp.sum(jnp.sum(broken.astype(jnp.int32), axis=1)) > 0, 0, count)
    rows, n = lax.fori_loop(0, count, step, (rows, jnp.int32(1)))

    kept = row <= budget
    for ref, values in ((tokens, rows.tokens), (depths, rows.depths), (parents, rows.parents), (scores, rows.scores)):
        plgpu.store(ref.at[slot, row], values, mask=kept)
    for i, word in enumerate(rows.ancestors):
        bit = jnp.arange(_WORD_BITS, dtype=jnp.int32)
        sees = ((word[:, None] >> bit[None, :]) & 1) != 0
        column = i * _WORD_BITS + bit
        plgpu.store(
            ancestors.at[slot, row[:, None], column[None, :]], sees, mask=kept[:, None] & (column <= budget)[None, :]
        )
    n_valid[slot] = n
