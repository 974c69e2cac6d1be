"""Numeric conventions shared by the ops."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def precision(dtype: jnp.dtype) -> lax.Precision:
    """Float32 matmuls are exact float32 (no TF32); narrower ones use the hardware default."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def matmul_nt(
    x: Float[Array, "*lead width"], w: Float[Array, "out width"], out_dtype: jnp.dtype | None = None
) -> Float[Array, "*lead out"]:
    """x @ w^T in the dtype of `x`, or accumulated into `out_dtype`."""
    return lax.dot_general(
        x, w, (((x.ndim - 1,), (1,)), ((), ())), precision=precision(x.dtype), preferred_element_type=out_dtype
    )


def matmul_weight_first(x: Float[Array, "*lead width"], w: Float[Array, "out width"]) -> Float[Array, "*lead out"]:
    """`matmul_nt` as w @ x^T: XLA's CPU backend repacks the right operand in every call, which should be small."""
    return jnp.moveaxis(weight_first(w, x, -1), 0, -1)


def weight_first(w: Float[Array, "out width"], x: Float[Array, "..."], axis: int) -> Float[Array, "out ..."]:
    """w @ x over axis `axis` of x, whose other axes follow in their order.

    The barrier keeps XLA from turning the product round again.
    """
    product = lax.dot_general(w, x, (((1,), (axis % x.ndim,)), ((), ())), precision=precision(x.dtype))
    return lax.optimization_barrier(product)
