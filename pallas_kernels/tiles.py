"""What the Triton kernels share: padded tile loads, sums of partial sums, products and exponentials."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.numerics import precision

LOG2_E = math.log2(math.e)
UNSEEN = -1e30
LOWEST_PEAK = -1e29  # above UNSEEN: where nothing is seen the weights are exp2(UNSEEN - LOWEST_PEAK) = 0
SMALLEST_DOT = 16


def tile(size: int) -> int:
    """The smallest size that a dot can take and that holds `size`."""
    return max(SMALLEST_DOT, pl.next_power_of_2(size))


def load(ref, before, rows, between, start, size):
    """ref[*before, rows, *between, start : start + size], padded with zeros to `tile(size)` columns."""
    column = jnp.arange(tile(size), dtype=jnp.int32)
    at = ref.at[(*before, rows[:, None], *between, start + column[None, :])]
    if size == tile(size):
        return plgpu.load(at)
    mask = jnp.broadcast_to((column < size)[None, :], (rows.shape[0], tile(size)))
    return plgpu.load(at, mask=mask, other=0.0)


def total(parts, token, column, inside, dtype, scale: Any = 1.0):
    """A product's values from its partial sums, a power of two of them, times `scale`; rounded as its result would be;
    float32.

    One load and a reduction: Triton passes each of several loads through shared memory where a dot follows.
    """
    part = jnp.arange(parts.shape[0], dtype=jnp.int32).reshape(-1, *[1] * inside.ndim)
    token, column = (jnp.broadcast_to(index, inside.shape)[None] for index in (token, column))
    mask = jnp.broadcast_to(inside[None], (parts.shape[0], *inside.shape))
    each = plgpu.load(parts.at[part, token, column], mask=mask, other=0.0)
    return (jnp.sum(each, axis=0) * scale).astype(dtype).astype(jnp.float32)


def inverse_rms(x, token, eps):
    """Of one row of `x`, for products of it that were made before its norm was known; float32."""
    column = jnp.arange(tile(x.shape[1]), dtype=jnp.int32)
    row = plgpu.load(x.at[token, column], mask=column < x.shape[1], other=0.0).astype(jnp.float32)
    return lax.rsqrt(jnp.sum(row * row) / x.shape[1] + eps)


def dot(a, b):
    return jnp.dot(a, b, precision=precision(a.dtype), preferred_element_type=jnp.float32)


def exp2(x, interpret):
    """The hardware's approximation: XLA's exp2 adds a treatment of subnormal results that weights have no use for."""
    if interpret:
        return jnp.exp2(x)
    (y,) = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=(x,),
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return y
