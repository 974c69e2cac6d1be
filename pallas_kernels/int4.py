"""The compressed-tensors `pack-quantized` INT4 layout, on raw arrays."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, UInt32


def dequantize(
    packed: UInt32[Array, "*lead rows words"],
    scale: BFloat16[Array, "*lead rows groups"],
    *,
    columns: int,
    group_size: int,
    dtype: jnp.dtype,
) -> Float[Array, "*lead rows columns"]:
    """bf16(q * scale) widened to `dtype`: the rounding of the compressed-tensors library.

    Column `c` is nibble `c % 8` (lowest first) of word `c // 8`, stored as q + 8.
    """
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32).reshape((1,) * packed.ndim + (8,))
    nibbles = (packed[..., None] >> shifts) & jnp.uint32(15)
    q = nibbles.reshape(*packed.shape[:-1], -1)[..., :columns].astype(jnp.float32) - 8.0
    full_scale = jnp.repeat(scale.astype(jnp.float32), group_size, axis=-1)[..., :columns]
    # reduce_precision, not a cast to bfloat16 and back: XLA may drop such a pair of casts.
    return lax.reduce_precision(q * full_scale, exponent_bits=8, mantissa_bits=7).astype(dtype)
