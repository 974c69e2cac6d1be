"""Attention of one draft block over the cached context and over itself."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.numerics import precision

# Context rows per step of the loop. Caches are whole multiples of it, so a step never has to be moved back.
KEYS = 128
UNSEEN = -1e30  # finite: the maximum over unseen keys must not produce inf - inf


def block_sees(block: int, causal: bool) -> Bool[Array, "block block"]:
    """Which block keys (columns) each block position sees."""
    everything = jnp.ones((block, block), bool)
    return jnp.tril(everything) if causal else everything


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


def attend(
    query: Float[Array, "slots block heads head_dim"],
    k: Float[Array, "slots block kv_heads head_dim"],
    v: Float[Array, "slots block kv_heads head_dim"],
    context_k: Float[Array, "slots rows kv_heads head_dim"],
    context_v: Float[Array, "slots rows kv_heads head_dim"],
    start: Int32[Array, "slots"],
    *,
    causal: bool,
    window: int | None,
) -> Float[Array, "slots block heads head_dim"]:
    """Softmax attention in float32, head h reading key head h // (heads / kv_heads), scale head_dim^-0.5.

    The context is read in steps of `KEYS` rows with an online softmax, from the first row that any slot's window
    reaches to the longest slot's end, so its cost follows the live length and not the capacity.
    """
    slots, block, heads, head_dim = query.shape
    kv_heads = k.shape[2]
    dtype, p = query.dtype, precision(query.dtype)
    grouped = query.reshape(slots, block, kv_heads, heads // kv_heads, head_dim)

    def step(carry, keys, values, seen):
        peak, total, out = carry
        scores = jnp.einsum(
            "sbkgd,sckd->skgbc", grouped, keys.astype(dtype), precision=p, preferred_element_type=jnp.float32
        )
        seen = jnp.broadcast_to(seen[:, None, None], scores.shape)
        scores = jnp.where(seen, scores * head_dim**-0.5, UNSEEN)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weight = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        keep = jnp.exp(peak - new_peak)
        added = jnp.einsum(
            "skgbc,sckd->skgbd",
            weight.astype(dtype),
            values.astype(dtype),
            precision=p,
            preferred_element_type=jnp.float32,
        )
        return new_peak, total * keep + jnp.sum(weight, axis=-1), out * keep[..., None] + added

    shape = (slots, kv_heads, heads // kv_heads, block)
    carry = jnp.full(shape, UNSEEN), jnp.zeros(shape), jnp.zeros((*shape, head_dim))
    inside = jnp.broadcast_to(block_sees(block, causal)[None], (slots, block, block))
    carry = step(carry, k, v, inside)

    def body(i, carry):
        first = i * KEYS
        keys, values = (lax.dynamic_slice_in_dim(rows, first, KEYS, axis=1) for rows in (context_k, context_v))
        row = first + jnp.arange(KEYS, dtype=jnp.int32)
        return step(carry, keys, values, context_sees(start, block, row, window))

    nearest = jnp.int32(0) if window is None else jnp.maximum(jnp.min(start) - window + 1, 0) // KEYS
    longest = jnp.minimum(jnp.max(start), context_k.shape[1])
    _, total, out = lax.fori_loop(nearest, -(-longest // KEYS), body, carry)
    out = out / total[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(slots, block, heads, head_dim).astype(dtype)
