"""Verification without a walk: the longest path of the tree on which the target agrees with the drafter."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from kdjax.tree.tree import Tree


class Acceptance(NamedTuple):
    """`rows[s, d]` is the accepted row of depth d, root first; entries from `n_accepted[s]` on repeat the root.

    `n_accepted` counts the root, so it is at least 1. `bonus` is the target's token after the last accepted row.
    """

    rows: Int[Array, "slots path"]
    n_accepted: Int[Array, "slots"]
    bonus: Int[Array, "slots"]


def accept(tree: Tree, posterior: Int[Array, "slots rows"], depth: int) -> Acceptance:
    """The accepted path given the target's token at every row (greedy or sampled); `path` is `depth` + 1.

    A node survives if it and all its ancestors carry the token chosen at their parent. Siblings carry different tokens,
    so the survivors form one path. A negative posterior matches no token.
    """
    rows = tree.tokens.shape[1]
    chosen = jnp.take_along_axis(posterior, jnp.maximum(tree.parents, 0), 1)
    index = jnp.arange(rows, dtype=jnp.int32)[None, :]
    agrees = (tree.tokens == chosen) & (index < tree.n_valid[:, None]) | (index == 0)
    survives = jnp.all(~tree.ancestors | agrees[:, None, :], 2)
    n_accepted = jnp.sum(survives, 1, dtype=jnp.int32)
    at_depth = tree.depths[:, None, :] == jnp.arange(depth + 1, dtype=jnp.int32)[None, :, None]
    path = jnp.max(jnp.where(at_depth & survives[:, None, :], index[:, None, :], 0), 2)
    last = jnp.take_along_axis(path, n_accepted[:, None] - 1, 1)
    return Acceptance(path, n_accepted, jnp.take_along_axis(posterior, last, 1)[:, 0])
