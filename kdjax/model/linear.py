"""Bias-free linear layers with weights [out, in] as in the checkpoint, dense or INT4."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kdjax.model.int4 import Int4, dequantize
from pallas_kernels.numerics import matmul_nt, matmul_weight_first


def linear(x: Float[Array, "*lead width"], weight: Float[Array, "out width"] | Int4) -> Float[Array, "*lead out"]:
    """x @ weight^T in the dtype of `x`."""
    dense = dequantize(weight, x.dtype) if isinstance(weight, Int4) else weight
    return matmul_nt(x, dense)


class Linear(nnx.Module):
    """x @ weight^T with weight [out, in], as in the checkpoint."""

    def __init__(self, width: int, out: int, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((out, width), dtype))

    def __call__(self, x: Float[Array, "*lead width"]) -> Float[Array, "*lead out"]:
        return linear(x, self.weight.get_value())


class WeightFirstLinear(Linear):
    """`Linear` for XLA's CPU backend."""

    def __call__(self, x: Float[Array, "*lead width"]) -> Float[Array, "*lead out"]:
        return matmul_weight_first(x, self.weight.get_value())
