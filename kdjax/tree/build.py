"""DDTree without a heap (Ringel & Romano, arXiv 2604.12989): score a static candidate set, keep the best B.

The heap of the paper pops nodes by (score falling, rank tuple rising, prefix first). That order alone defines the tree,
so one gather-sum over the candidate table and one exact selection give it; the tree of a smaller budget is a prefix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kdjax.errors import KdjaxError
from kdjax.model import parallel
from kdjax.tree.backends import runs_kernels
from kdjax.tree.candidates import Candidates, candidates
from kdjax.tree.marginals import marginals
from kdjax.tree.tree import Tree
from pallas_kernels import draft_tree
from pallas_kernels.draft_tree import fixed_point


def build(
    logits: Float[Array, "slots depth vocab"],
    roots: Int[Array, "slots"],
    budget: int,
    budgets: Int[Array, "slots"] | None = None,
    axes: tuple[str, ...] = (),
    *,
    backend: str = "xla",
) -> Tree:
    """The best tree of `budget` nodes (root not counted) per slot from the drafter's logits.

    `budgets` lowers the budget per slot at run time. A slot with a NaN or all -inf row gets the root alone. The
    vocabulary may be split over mesh `axes`; the tree is then the same on every device. `backend` is that of the
    runtime, which makes no difference to the nodes.

    Raises:
        KdjaxError: no such backend, or a budget or depth that is too large.
    """
    slots, depth, vocab = logits.shape
    if budget == 0 or depth == 0:
        return root_only(roots, 1 + budget)
    lp, ids = marginals(logits, min(budget, vocab * parallel.parts(axes)), axes, backend=backend)
    return select(lp, ids, roots, budget, budgets, backend=backend)


def root_only(roots: Int[Array, "slots"], rows: int = 1) -> Tree:
    """The tree of plain decoding: no draft at all."""
    slots = roots.shape[0]
    padding = jnp.zeros((slots, rows - 1), jnp.int32)
    return Tree(
        tokens=jnp.concatenate([roots[:, None], padding], 1),
        depths=jnp.zeros((slots, rows), jnp.int32),
        parents=jnp.full((slots, rows), -1, jnp.int32),
        ancestors=jnp.broadcast_to(jnp.eye(rows, dtype=bool), (slots, rows, rows)),
        scores=jnp.broadcast_to(jnp.where(jnp.arange(rows) == 0, 0.0, -jnp.inf), (slots, rows)).astype(jnp.float32),
        n_valid=jnp.ones((slots,), jnp.int32),
    )


def select(
    lp: Float[Array, "slots depth top"],
    ids: Int[Array, "slots depth top"],
    roots: Int[Array, "slots"],
    budget: int,
    budgets: Int[Array, "slots"] | None = None,
    *,
    backend: str = "xla",
) -> Tree:
    """`build` from an explicit table: log-probabilities (float32, falling along `top`) and token ids per depth.

    XLA compiles a gather-sum over the table of `candidates`; the kernel searches, up to `draft_tree.MOST_NODES` nodes,
    beyond which every backend takes the table.

    Raises:
        KdjaxError: no such backend, or a budget or depth that is out of range.
    """
    slots, depth, top = lp.shape
    if budget < 1 or depth < 1:
        raise KdjaxError(f"select needs a budget and a depth of at least 1, not {budget} and {depth}: use root_only")
    table = candidates(depth, budget, min(budget, top))
    ids, roots = ids.astype(jnp.int32), roots.astype(jnp.int32)
    limit = None if budgets is None else jnp.clip(budgets, 0, budget)
    # A GPU would spend 13 kernels on the table; one program that searches is faster there.
    if runs_kernels(backend) and budget <= draft_tree.MOST_NODES:
        grown = draft_tree.grow(lp, ids, roots, limit, budget=budget, interpret=backend == "interpret")
        return Tree(**grown._asdict())
    broken = jnp.any(jnp.isnan(lp), (1, 2)) | ~jnp.all(jnp.isfinite(lp[:, :, 0]), 1)
    limit = jnp.where(broken, 0, jnp.full((slots,), budget, jnp.int32) if limit is None else limit)
    return jax.vmap(lambda *slot: _select(*slot, table=table, budget=budget))(lp, ids, roots, limit)


def _select(
    lp: Float[Array, "depth top"],
    ids: Int[Array, "depth top"],
    root: Int[Array, ""],
    limit: Int[Array, ""],
    table: Candidates,
    budget: int,
) -> Tree:
    depth, top = lp.shape
    cell = np.where(table.ranks >= 0, np.arange(depth) * top + table.ranks, depth * top)
    cost = _cost_keys(lp, cell)
    chosen = _smallest(cost, k=min(budget, len(cell)))
    n_nodes = jnp.minimum(jnp.sum(jnp.isfinite(cost[0, chosen]), dtype=jnp.int32), limit)

    pad = (0, budget - len(chosen))
    used = jnp.pad(jnp.arange(len(chosen)) < n_nodes, pad)
    chosen = jnp.pad(chosen, pad)
    # Row of every candidate, by inverting the choice; the last entry serves the -1 of the tables.
    rows = jnp.zeros((len(cell) + 1,), jnp.int32)
    rows = rows.at[jnp.where(used, chosen, len(cell))].set(1 + jnp.arange(budget, dtype=jnp.int32))
    rows = rows.at[len(cell)].set(0)

    depths = jnp.asarray(table.depths)[chosen]
    last = jnp.asarray(table.ranks)[chosen, depths - 1]
    node_scores = jnp.sum(jnp.append(lp.reshape(-1), jnp.zeros((1,), lp.dtype))[jnp.asarray(cell)[chosen]], 1)
    lineage = rows[jnp.asarray(table.ancestors)[chosen]]
    every_row = jnp.arange(1 + budget, dtype=jnp.int32)
    sees = jnp.any(lineage[:, :, None] == every_row[None, None, :], 1) | (every_row == 0)[None, :]
    sees = jnp.where(used[:, None], sees, every_row[None, :] == every_row[1:, None])

    def with_root(value: Array, nodes: Array, padding: int | float) -> Array:
        return jnp.concatenate([value[None], jnp.where(used, nodes, jnp.full_like(nodes, padding))])

    return Tree(
        tokens=with_root(root, ids[depths - 1, last], 0),
        depths=with_root(jnp.zeros((), jnp.int32), depths, 0),
        parents=with_root(jnp.full((), -1, jnp.int32), rows[jnp.asarray(table.parents)[chosen]], -1),
        ancestors=jnp.concatenate([(every_row == 0)[None, :], sees]),
        scores=with_root(jnp.zeros((), jnp.float32), node_scores, -np.inf),
        n_valid=1 + n_nodes,
    )


def _cost_keys(lp: Float[Array, "depth top"], cell: np.ndarray) -> Float[Array, "limbs candidates"]:
    """Exact cost (negated score) of each candidate, most significant limb first; +inf for an impossible one.

    float32 sums would round differently along different paths and break ties wrongly; these are integers.
    """
    flat = lp.reshape(-1)
    impossible = (~jnp.isfinite(flat)).astype(jnp.uint32)
    limbs = jnp.pad(jnp.concatenate([impossible[None], jnp.stack(fixed_point.limbs(flat))]), ((0, 0), (0, 1)))
    impossible, *sums = jnp.sum(limbs[:, cell], -1, dtype=jnp.uint32)
    keys, carry = [], jnp.zeros_like(impossible)
    for limb in sums[::-1]:
        total = limb + carry
        keys.append((total & fixed_point.LIMB_MASK).astype(jnp.float32))
        carry = total >> fixed_point.LIMB_BITS
    keys[-1] = jnp.where(impossible > 0, jnp.inf, keys[-1])
    return jnp.stack(keys[::-1])


def _smallest(keys: Float[Array, "limbs candidates"], k: int) -> Int[Array, "k"]:
    """Indices of the k smallest multi-limb keys in rising order, lower index first on ties.

    One pass per limb narrows the k-th key, as in a radix select: a full multi-key sort of 30,000 candidates takes
    10 ms on a CPU core, these top-k passes well under 1 ms.
    """
    inside = jnp.zeros(keys.shape[1:], jnp.float32)  # 1: among the k for certain, 0: tied so far, -1: out
    for limb in -keys:
        rank = jnp.where(inside > 0, jnp.inf, jnp.where(inside < 0, -jnp.inf, limb))
        kth = jnp.min(lax.top_k(rank, k)[0])  # not a slice of it: XLA turns that into a full sort
        inside = jnp.where(inside == 0, jnp.sign(jnp.where(limb == kth, 0.0, limb - kth)), inside)
    chosen = jnp.sort(lax.top_k(inside, k)[1]).astype(jnp.int32)
    return lax.sort((*keys[:, chosen], chosen), num_keys=len(keys), is_stable=True)[-1]


def chain(
    logits: Float[Array, "slots depth vocab"],
    roots: Int[Array, "slots"],
    budget: int,
    budgets: Int[Array, "slots"] | None = None,
    axes: tuple[str, ...] = (),
    *,
    backend: str = "xla",
) -> Tree:
    """Plain DFlash: the most likely token of each of the first `budget` depths, one path, as a `Tree`.

    A slot with a NaN or all -inf row gets the root alone. `axes` and `backend` as in `build`.

    Raises:
        KdjaxError: no such backend, or a budget above the drafted depth.
    """
    slots, depth, _ = logits.shape
    if budget > depth:
        raise KdjaxError(f"chain budget {budget} exceeds the draft depth {depth}: use at most block_size - 1")
    if budget == 0:
        return root_only(roots)
    lp, ids = marginals(logits, 1, axes, backend=backend)
    broken = jnp.any(~jnp.isfinite(lp[:, :, 0]), 1)
    limit = jnp.full((slots,), budget, jnp.int32) if budgets is None else jnp.clip(budgets, 0, budget)
    n_valid = 1 + jnp.where(broken, 0, limit)
    rows = jnp.arange(1 + budget, dtype=jnp.int32)
    used = rows[None, :] < n_valid[:, None]
    scores = jnp.pad(jnp.cumsum(lp[:, :budget, 0], 1), ((0, 0), (1, 0)))
    causal = (rows[None, :] <= rows[:, None])[None]
    return Tree(
        tokens=jnp.where(used, jnp.concatenate([roots[:, None], ids[:, :budget, 0]], 1), 0),
        depths=jnp.where(used, rows[None, :], 0),
        parents=jnp.where(used, rows[None, :] - 1, -1),
        ancestors=jnp.where(used[:, :, None], causal, jnp.eye(1 + budget, dtype=bool)[None]),
        scores=jnp.where(used, scores, -jnp.inf),
        n_valid=n_valid,
    )
