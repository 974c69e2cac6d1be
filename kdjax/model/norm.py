"""RMSNorm."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*lead width"], weight: Float[Array, "width"], eps: float) -> Float[Array, "*lead width"]:
    """x * rsqrt(mean(x^2) + eps) in float32, rounded to the dtype of `x`, then times `weight` (HF order)."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


class RMSNorm(nnx.Module):
    """`rms_norm` with a weight [width]."""

    def __init__(self, width: int, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(width, dtype))

    def __call__(self, x: Float[Array, "*lead width"]) -> Float[Array, "*lead width"]:
        return rms_norm(x, self.weight.get_value(), self.eps)
