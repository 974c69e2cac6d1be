"""Prefill attention in float32, one softmax over the whole cache: the truth the backends are tested against."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


def reference(
    q_nope: Float[Array, "slots q heads nope"],
    q_rope: Float[Array, "slots q heads rope"],
    cache_rows: Float[Array, "slots rows width"],
    lengths: Int32[Array, "slots"],
    up: Float[Array, "heads nope_and_v rank"],
    *,
    scale: float,
) -> Float[Array, "slots q heads v"]:
    """`prefill_attention` in float32, with all keys and values at once."""
    q_nope, q_rope, cache_rows, up = (x.astype(jnp.float32) for x in (q_nope, q_rope, cache_rows, up))
    q, nope, rank, highest = q_nope.shape[1], q_nope.shape[-1], up.shape[-1], lax.Precision.HIGHEST
    expanded = jnp.einsum("scr,hxr->shcx", cache_rows[..., :rank], up, precision=highest)
    scores = jnp.einsum("sqhn,shcn->sqhc", q_nope, expanded[..., :nope], precision=highest)
    scores += jnp.einsum("sqhp,scp->sqhc", q_rope, cache_rows[..., rank:], precision=highest)
    last = lengths[:, None] + jnp.arange(q, dtype=jnp.int32)[None, :]
    seen = jnp.arange(cache_rows.shape[1], dtype=jnp.int32)[None, None, :] <= last[:, :, None]
    scores = jnp.where(seen[:, :, None, :], scores * scale, -jnp.inf)
    weight = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    weight /= jnp.sum(weight, axis=-1, keepdims=True)
    return jnp.einsum("sqhc,shcv->sqhv", weight, expanded[..., nope:], precision=highest)
