"""The INT4 matrix as a pytree that stays packed from the file to the kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels.int4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4:
    """A symmetric INT4 matrix (or a stack of them) in compressed-tensors `pack-quantized` layout.

    Column `c` of a row is nibble `c % 8` (lowest first) of word `c // 8`, stored as value + 8; `scale[r, c // group]`
    applies to it. `columns` is the logical input width (config key `weight_shape[1]`).

    Attributes:
        packed: uint32 [*lead, rows, words].
        scale: bfloat16 [*lead, rows, groups].
    """

    # Any: as a pytree it also carries shape structs and shardings in place of its arrays.
    packed: Any
    scale: Any
    columns: int = dataclasses.field(metadata={"static": True})
    group_size: int = dataclasses.field(metadata={"static": True}, default=32)


def dequantize(weight: Int4, dtype: jnp.dtype) -> Float[Array, "*lead rows columns"]:
    """bf16(q * scale) widened to `dtype`: the rounding of the compressed-tensors library."""
    return pallas_kernels.int4.dequantize(
        weight.packed, weight.scale, columns=weight.columns, group_size=weight.group_size, dtype=dtype
    )
