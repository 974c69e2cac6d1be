"""A product of few tokens with a large weight as partial sums, which the kernel that reads them adds up.

On a GPU XLA cuts such a product over its columns too, so that all multiprocessors read, and adds the parts in a kernel
of their own unless it can fuse that into what follows. It cannot fuse into a Pallas kernel.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.split import triton, xla

KERNELS = ("triton", "interpret")
"""Backends that have a kernel for few tokens; others leave them to XLA."""


def split_matmul_nt(
    x: Float[Array, "tokens width"],
    *weights: Float[Array, "_ width"],
    column_scale: Float[Array, "width"] | None = None,
    backend: str,
) -> Float32[Array, "parts tokens out"]:
    """(x * column_scale) @ weight^T for weights side by side, float32: the product is the sum over the parts.

    No weight is copied to stand beside another. The parts are as many as keep a GPU busy at these sizes.

    Args:
        x: the tokens.
        column_scale: the weight of a norm that precedes the product; None is none.
        backend: "xla", or "triton" (NVIDIA GPUs) and "interpret", whose product of few tokens is a kernel.
    """
    if backend in KERNELS and triton.fits(*x.shape):
        return triton.split_matmul_nt(x, weights, column_scale, interpret=backend == "interpret")
    scaled = x if column_scale is None else x * jnp.broadcast_to(column_scale, x.shape)
    return xla.split_matmul_nt(scaled, *weights)
