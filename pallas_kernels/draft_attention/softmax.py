"""The running softmax of a draft block, and what its positions see."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.numerics import precision
from pallas_kernels.tiles import UNSEEN

KEYS = 128
"""Context rows per step of a loop. Caches are whole multiples of it, so a step never has to be moved back."""


class State(NamedTuple):
    """Largest score, sum of weights relative to it, weighted sum of values."""

    peak: Float32[Array, "slots kv_heads group block"]
    total: Float32[Array, "slots kv_heads group block"]
    out: Float32[Array, "slots kv_heads group block head_dim"]


def group(
    query: Float[Array, "slots block heads head_dim"], kv_heads: int
) -> Float[Array, "slots block kv_heads group head_dim"]:
    """By the key head that they read."""
    slots, block, heads, head_dim = query.shape
    return query.reshape(slots, block, kv_heads, heads // kv_heads, head_dim)


def empty(grouped: Float[Array, "slots block kv_heads group head_dim"]) -> State:
    slots, block, kv_heads, queries, head_dim = grouped.shape
    shape = (slots, kv_heads, queries, block)
    return State(jnp.full(shape, UNSEEN), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))


def fold(
    state: State,
    grouped: Float[Array, "slots block kv_heads group head_dim"],
    keys: Float[Array, "slots keys kv_heads head_dim"],
    values: Float[Array, "slots keys kv_heads head_dim"],
    seen: Bool[Array, "slots block keys"],
) -> State:
    """`state` with these keys added."""
    dtype, p = grouped.dtype, precision(grouped.dtype)
    scores = jnp.einsum(
        "sbkgd,sckd->skgbc", grouped, keys.astype(dtype), precision=p, preferred_element_type=jnp.float32
    )
    seen = jnp.broadcast_to(seen[:, None, None], scores.shape)
    scores = jnp.where(seen, scores * grouped.shape[-1] ** -0.5, UNSEEN)
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=-1))
    weight = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0.0)
    keep = jnp.exp(state.peak - peak)
    added = jnp.einsum(
        "skgbc,sckd->skgbd",
        weight.astype(dtype),
        values.astype(dtype),
        precision=p,
        preferred_element_type=jnp.float32,
    )
    return State(peak, state.total * keep + jnp.sum(weight, axis=-1), state.out * keep[..., None] + added)


def normalised(
    state: State, query: Float[Array, "slots block heads head_dim"]
) -> Float[Array, "slots block heads head_dim"]:
    """The attention, in the shape and dtype of `query`."""
    out = state.out / state.total[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(query.shape).astype(query.dtype)


def block_sees(slots: int, block: int, causal: bool) -> Bool[Array, "slots block block"]:
    """Which block keys (columns) each block position sees."""
    everything = jnp.ones((block, block), bool)
    return jnp.broadcast_to((jnp.tril(everything) if causal else everything)[None], (slots, block, block))


def context_sees(
    start: Int32[Array, "slots"], block: int, row: Int32[Array, "keys"], window: int | None
) -> Bool[Array, "slots block keys"]:
    """Which context rows each block position sees: the committed ones, in sliding layers those nearer than `window`.

    The distance is the query's own position (start + slot in the block) minus the row's.
    """
    seen = row[None, None, :] < start[:, None, None]
    query = start[:, None] + jnp.arange(block, dtype=jnp.int32)[None, :]
    if window is not None:
        seen &= query[:, :, None] - row[None, None, :] < window
    return jnp.broadcast_to(seen, (len(start), block, len(row)))
