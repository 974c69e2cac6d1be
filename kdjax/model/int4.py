"""The INT4 matrix as a pytree that stays packed from the file to the kernel."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, UInt32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4:
    """A symmetric INT4 matrix (or a stack of them) in compressed-tensors `pack-quantized` layout.

    Column `c` of a row is nibble `c % 8` (lowest first) of word `c // 8`, stored as value + 8; `scale[r, c // group]`
    applies to it. `columns` is the logical input width (config key `weight_shape[1]`).
    """

    packed: UInt32[Array, "*lead rows words"]
    scale: BFloat16[Array, "*lead rows groups"]
    columns: int = dataclasses.field(metadata={"static": True})
    group_size: int = dataclasses.field(metadata={"static": True}, default=32)


def dequantize(weight: Int4, dtype: jnp.dtype) -> Float[Array, "*lead rows columns"]:
    """bf16(q * scale) widened to `dtype`: the rounding of the compressed-tensors library."""
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32)
    nibbles = (weight.packed[..., None] >> shifts) & jnp.uint32(15)
    q = nibbles.reshape(*weight.packed.shape[:-1], -1)[..., : weight.columns].astype(jnp.float32) - 8.0
    scale = jnp.repeat(weight.scale.astype(jnp.float32), weight.group_size, axis=-1)[..., : weight.columns]
    return (q * scale).astype(jnp.bfloat16).astype(dtype)
