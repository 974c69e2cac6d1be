"""Attention results over disjoint sets of rows, joined by their log-sum-exp."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32


def merge(
    outs: Float[Array, "parts slots q heads rank"], lses: Float32[Array, "parts slots q heads"]
) -> tuple[Float[Array, "slots q heads rank"], Float32[Array, "slots q heads"]]:
    """The attention over the union of the parts' rows, with its log-sum-exp.

    `outs` are normalised within their part; a part that saw nothing has log-sum-exp -inf and does not count.
    """
    peak = jnp.max(lses, axis=0)
    weights = jnp.exp(lses - _finite(peak)[None])
    total = jnp.sum(weights, axis=0)
    out = jnp.sum(outs.astype(jnp.float32) * weights[..., None], axis=0)
    return _normalised(out, total, outs.dtype), _finite(peak) + jnp.log(total)


def merge_over(
    axis_name: str, out: Float[Array, "slots q heads rank"], lse: Float32[Array, "slots q heads"]
) -> tuple[Float[Array, "slots q heads rank"], Float32[Array, "slots q heads"]]:
    """`merge` of the parts on the devices of a mesh axis, inside `jax.shard_map`: a cache sharded over the sequence."""
    peak = lax.pmax(lse, axis_name)
    weight = jnp.exp(lse - _finite(peak))
    total, summed = lax.psum((weight, out.astype(jnp.float32) * weight[..., None]), axis_name)
    return _normalised(summed, total, out.dtype), _finite(peak) + jnp.log(total)


def _finite(peak: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Where nothing was seen anywhere, -inf - -inf must not become NaN."""
    return jnp.where(jnp.isfinite(peak), peak, jnp.zeros_like(peak))


def _normalised(
    out: Float32[Array, "*shape rank"], total: Float32[Array, "*shape"], dtype: jnp.dtype
) -> Float[Array, "*shape rank"]:
    return (out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]).astype(dtype)
