"""Numeric conventions shared by the ops."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def precision(dtype: jnp.dtype) -> lax.Precision:
    """Float32 matmuls are exact float32 (no TF32); narrower ones use the hardware default."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def matmul(x: Float[Array, "*lead width"], w: Float[Array, "width out"]) -> Float[Array, "*lead out"]:
    """x @ w in the dtype of `x`."""
    return jnp.matmul(x, w, precision=precision(x.dtype))


def matmul_nt(
    x: Float[Array, "*lead width"], w: Float[Array, "out width"], out_dtype: jnp.dtype | None = None
) -> Float[Array, "*lead out"]:
    """x @ w^T in the dtype of `x`, or accumulated into `out_dtype`."""
    return lax.dot_general(
        x, w, (((x.ndim - 1,), (1,)), ((), ())), precision=precision(x.dtype), preferred_element_type=out_dtype
    )
