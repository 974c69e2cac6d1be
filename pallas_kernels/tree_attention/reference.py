"""Tree attention in float32 as one masked softmax over the whole cache: the truth the backends are tested against."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32


def visibility(
    lengths: Int32[Array, "slots"], ancestors: Bool[Array, "slots q q"], rows: int
) -> Bool[Array, "slots q rows"]:
    """Which cache rows each token sees."""
    row = jnp.arange(rows, dtype=jnp.int32)
    node = row[None, :] - lengths[:, None]
    tree = jnp.take_along_axis(ancestors, jnp.clip(node, 0, ancestors.shape[-1] - 1)[:, None, :], axis=2)
    tree = tree & ((node >= 0) & (node < ancestors.shape[-1]))[:, None, :]
    return tree | (node < 0)[:, None, :]


def reference(
    q_latent: Float[Array, "slots q heads rank"],
    q_rope: Float[Array, "slots q heads rope"],
    cache_rows: Float[Array, "slots rows rank+rope"],
    lengths: Int32[Array, "slots"],
    ancestors: Bool[Array, "slots q q"] | None,
    *,
    scale: float,
) -> Float[Array, "slots q heads rank"]:
    """`tree_attention` in float32."""
    slots, q, _, rank = q_latent.shape
    if ancestors is None:
        ancestors = jnp.broadcast_to(jnp.tril(jnp.ones((q, q), bool)), (slots, q, q))
    query = jnp.concatenate([q_latent, q_rope], axis=-1).astype(jnp.float32)
    rows = cache_rows.astype(jnp.float32)
    scores = jnp.einsum("sqhw,scw->sqhc", query, rows, precision=lax.Precision.HIGHEST) * scale
    seen = visibility(lengths, ancestors, rows.shape[1])[:, :, None, :]
    scores = jnp.where(seen, scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    p = jnp.where(seen, jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0.0)), 0.0)
    p = p / jnp.maximum(jnp.sum(p, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return jnp.einsum("sqhc,scr->sqhr", p, rows[..., :rank], precision=lax.Precision.HIGHEST)
