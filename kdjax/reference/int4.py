"""compressed-tensors `pack-quantized` INT4: eight offset-binary nibbles per int32 word, one scale per column group."""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Float64, Int8, Int32

Rounding = Literal["bfloat16", "float32"]


def pack(codes: Int8[np.ndarray, "*lead rows columns"]) -> Int32[np.ndarray, "*lead rows words"]:
    """Column c of a row becomes nibble c % 8 (lowest first) of word c // 8, stored as code + 8; spare nibbles are 0."""
    *lead, columns = codes.shape
    words = -(-columns // 8)
    nibbles = np.zeros((*lead, words * 8), np.uint32)
    nibbles[..., :columns] = codes.astype(np.int32) + 8
    shifted = nibbles.reshape(*lead, words, 8) << np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(shifted, axis=-1).view(np.int32)


def unpack(packed: Int32[np.ndarray, "*lead rows words"], columns: int) -> Int8[np.ndarray, "*lead rows columns"]:
    """Codes in [-8, 7]; `columns` is config key `weight_shape[1]`, which cuts the spare nibbles off."""
    nibbles = (packed.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
    return (nibbles.reshape(*packed.shape[:-1], -1)[..., :columns].astype(np.int8) - 8).astype(np.int8)


def dequantise(
    packed: Int32[np.ndarray, "*lead rows words"],
    scale: BFloat16[np.ndarray, "*lead rows groups"],
    columns: int,
    group_size: int = 32,
    rounding: Rounding = "bfloat16",
) -> Float64[np.ndarray, "*lead rows columns"]:
    """code * scale of the column's group.

    The library rounds the product to bfloat16. "float32" keeps the product instead (exact, since a 4-bit code times
    an 8-bit mantissa fits); on full-mantissa scales the two give visibly different logits.
    """
    codes = unpack(packed, columns).astype(np.float32)
    scales = np.repeat(scale.astype(np.float32), group_size, axis=-1)[..., :columns]
    with np.errstate(over="ignore"):  # the largest scales overflow at code -8; infinity is the library's answer too
        product = codes * scales
    return (product.astype(ml_dtypes.bfloat16) if rounding == "bfloat16" else product).astype(np.float64)


def quantise(
    weight: BFloat16[np.ndarray, "rows columns"], group_size: int = 32, largest_code: float = 7.5
) -> tuple[Int8[np.ndarray, "rows columns"], BFloat16[np.ndarray, "rows groups"]]:
    """Codes and scales; scale = max |group| / `largest_code`, 7.5 in the library and 7 in K2's QAT (code -8 unused).

    Every step is rounded to bfloat16 and codes are rounded half to even, as the library does. A group of zeros gets
    the float32 epsilon for its scale, so that the division is defined.
    """
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // group_size, group_size)
    scale = np.abs(groups).max(-1) / ml_dtypes.bfloat16(largest_code)
    scale = np.where(scale == 0, np.finfo(np.float32).eps, scale).astype(ml_dtypes.bfloat16)
    codes = np.rint(np.clip((groups / scale[..., None]).astype(np.float32), -8, 7))
    return codes.reshape(rows, columns).astype(np.int8), scale
