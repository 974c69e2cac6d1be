"""The k first of many by counting who comes before, for GPUs: comparisons are cheap there, and a sort is many kernels.

XLA's GPU backend sorts whole rows for a top-k of more than 16. Counting takes the square of the number of entries, so
a long row is first narrowed to the blocks that can hold one of its k largest.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

BLOCKS = (256, 16, 1)
"""Widths of the narrowing: a row of 163,840 is 640 blocks, and k of them 16 k blocks of 16."""


def top_k(values: Float[Array, "*rows n"], k: int) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """`lax.top_k`: the k largest in falling order and their positions, lowest position first among equal ones.

    One of the k largest lies in one of the k blocks with the largest maxima, lower blocks first among equal ones: k
    others would come before it otherwise.
    """
    n = values.shape[-1]
    padding = -n % BLOCKS[0]
    values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, padding)], constant_values=-np.inf)
    start = jnp.broadcast_to(jnp.zeros((1,), jnp.int32), (*values.shape[:-1], 1))
    for width in BLOCKS:
        values = values.reshape(*start.shape[:-1], -1, width)
        inner = jnp.arange(values.shape[-2] // start.shape[-1], dtype=jnp.int32) * width
        start = (start[..., :, None] + jnp.expand_dims(inner, tuple(range(start.ndim)))).reshape(values.shape[:-1])
        largest = jnp.max(values, axis=-1)
        before = (largest[..., None, :] > largest[..., :, None]) | (
            (largest[..., None, :] == largest[..., :, None]) & (start[..., None, :] < start[..., :, None])
        )
        chosen = _first(before, k)
        values = jnp.take_along_axis(values, chosen[..., None], axis=-2)
        start = jnp.take_along_axis(start, chosen, axis=-1)
    return values[..., 0], start


def smallest(keys: Float[Array, "limbs n"], k: int) -> Int[Array, "k"]:
    """Positions of the k smallest multi-limb keys (most significant first) in rising order, lower position on ties."""
    position = jnp.arange(keys.shape[1], dtype=jnp.int32)
    before = position[None, :] < position[:, None]
    for limb in keys[::-1]:
        mine, other = limb[:, None], limb[None, :]
        before = (other < mine) | ((other == mine) & before)
    return _first(before, k)


def _first(before: Bool[Array, "*rows n others"], k: int) -> Int[Array, "*rows first"]:
    """Positions of the first min(k, n) entries in order; `before[i, j]`: j comes before i."""
    n = before.shape[-1]
    rank = jnp.sum(before, axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(min(k, n), dtype=jnp.int32).reshape((1,) * (rank.ndim - 1) + (-1, 1))
    position = jnp.arange(n, dtype=jnp.int32).reshape((1,) * rank.ndim + (n,))
    return jnp.sum(jnp.where(rank[..., None, :] == wanted, position, 0), axis=-1, dtype=jnp.int32)
