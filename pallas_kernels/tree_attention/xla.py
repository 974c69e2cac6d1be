"""Plain-JAX tree attention: committed and tree rows alike, in blocks of the cache with an online softmax."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.numerics import precision
from pallas_kernels.tree_attention.reference import visibility

BLOCK = 128
UNSEEN = -1e30  # finite: a row with nothing seen yet must not produce inf - inf


def partial(
    q_latent: Float[Array, "slots q heads rank"],
    q_rope: Float[Array, "slots q heads rope"],
    cache_rows: Float[Array, "slots rows rank+rope"],
    lengths: Int32[Array, "slots"],
    ancestors: Bool[Array, "slots q q"] | None,
    *,
    scale: float,
) -> tuple[Float[Array, "slots q heads rank"], Float32[Array, "slots q heads"]]:
    """Attention and its log-sum-exp."""
    slots, q, heads, rank = q_latent.shape
    rows, width = cache_rows.shape[1:]
    dtype = q_latent.dtype
    p = precision(dtype)
    query = jnp.concatenate([q_latent, q_rope], axis=-1).reshape(slots, q * heads, width)

    if ancestors is None:
        ancestors = jnp.broadcast_to(jnp.tril(jnp.ones((q, q), bool)), (slots, q, q))
    # One mask for the whole cache: the same for every layer, so XLA makes it once per forward.
    seen = visibility(lengths, ancestors, rows)
    block = min(BLOCK, rows)

    def body(i, carry):
        """One online-softmax step. Values are whole rows (the rotary tail is cut once, at the end): no copy of keys."""
        peak, total, out = carry
        # The last block is moved back to end with the cache; rows an earlier block covered are masked.
        start = jnp.minimum(i * block, rows - block)
        new = start + jnp.arange(block, dtype=jnp.int32) >= i * block
        mask = lax.dynamic_slice_in_dim(seen, start, block, axis=2) & new[None, None, :]
        keys = lax.dynamic_slice_in_dim(cache_rows, start, block, axis=1).astype(dtype)
        scores = jnp.einsum("sqw,scw->sqc", query, keys, precision=p, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(mask[:, :, None, :], scores.reshape(slots, q, heads, block), UNSEEN)
        scores = scores.reshape(slots, q * heads, block)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        # 1 where nothing was seen so far, which `keep` forgets once something is, and the end if nothing ever is.
        weight = jnp.exp(scores - new_peak[..., None])
        keep = jnp.exp(peak - new_peak)
        added = jnp.einsum("sqc,scw->sqw", weight.astype(dtype), keys, precision=p, preferred_element_type=jnp.float32)
        return new_peak, total * keep + jnp.sum(weight, axis=-1), out * keep[..., None] + added

    carry = (
        jnp.full((slots, q * heads), UNSEEN, jnp.float32),
        jnp.zeros((slots, q * heads), jnp.float32),
        jnp.zeros((slots, q * heads, width), jnp.float32),
    )
    longest = jnp.minimum(jnp.max(lengths) + q, rows)
    peak, total, out = lax.fori_loop(0, -(-longest // block), body, carry)
    any_seen = peak > UNSEEN / 2
    out = jnp.where(any_seen[..., None], out[..., :rank] / total[..., None], 0.0)
    lse = jnp.where(any_seen, peak + jnp.log(total), -jnp.inf)
    return out.reshape(slots, q, heads, rank).astype(dtype), lse.reshape(slots, q, heads)
