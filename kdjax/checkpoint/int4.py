"""compressed-tensors `pack-quantized` INT4 on the host: codes to words and back, and the quantiser."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Float, Int8, Int32

from kdjax.errors import KdjaxError
from kdjax.model.int4 import Int4

PER_WORD = 8
SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)

ScaleRule = Literal["max/7", "max/7.5"]


def pack(codes: Int8[np.ndarray, "*lead rows columns"]) -> Int32[np.ndarray, "*lead rows words"]:
    """Codes in [-8, 7] to int32 words: column c is nibble c % 8 (lowest first) of word c // 8, stored as code + 8.

    The unused nibbles of a last, partly filled word are 0.
    """
    columns = codes.shape[-1]
    nibbles = (codes.astype(np.int32) + 8).astype(np.uint32)
    nibbles = np.pad(nibbles, [(0, 0)] * (codes.ndim - 1) + [(0, -columns % PER_WORD)])
    nibbles = nibbles.reshape(*codes.shape[:-1], -1, PER_WORD)
    return np.bitwise_or.reduce(nibbles << SHIFTS, axis=-1).view(np.int32)


def unpack(words: Int32[np.ndarray, "*lead rows words"], columns: int) -> Int8[np.ndarray, "*lead rows columns"]:
    """The inverse of `pack`. `columns` is the logical width (`weight_shape[1]`)."""
    nibbles = (words.view(np.uint32)[..., None] >> SHIFTS) & np.uint32(15)
    return nibbles.reshape(*words.shape[:-1], -1)[..., :columns].astype(np.int8) - np.int8(8)


def quantize(
    weight: Float[np.ndarray, "*lead rows columns"], group_size: int, rule: ScaleRule
) -> tuple[Int8[np.ndarray, "*lead rows columns"], Float[np.ndarray, "*lead rows groups"]]:
    """Symmetric INT4 codes and bf16 scales, one scale per `group_size` columns.

    `max/7.5` is the compressed-tensors rule and uses code -8; `max/7`, reported for Moonshot's weights, does not.
    Division rounds to the weight's own dtype before rounding half to even: bfloat16 weights give the codes of the
    compressed-tensors library, float32 weights those of float32 fake quantisation. An all-zero group gets the scale
    `eps(float32)`, as in the library: a zero scale would divide by zero.

    Raises:
        KdjaxError: the width is not a multiple of `group_size`, or a weight is not finite.
    """
    columns = weight.shape[-1]
    if columns % group_size:
        raise KdjaxError(f"cannot quantize {columns} columns in groups of {group_size}: use a divisor of the width")
    if not np.isfinite(weight).all():
        raise KdjaxError("cannot quantize a weight with NaN or infinite entries: repair the weight first")
    groups = weight.reshape(*weight.shape[:-1], columns // group_size, group_size)
    largest = np.abs(groups).max(axis=-1).astype(np.float32)
    scale = (largest / np.float32({"max/7": 7.0, "max/7.5": 7.5}[rule])).astype(ml_dtypes.bfloat16)
    scale = np.where(scale == 0, np.finfo(np.float32).eps.astype(ml_dtypes.bfloat16), scale)
    ratio = (groups.astype(np.float32) / scale.astype(np.float32)[..., None]).astype(weight.dtype)
    codes = np.clip(np.rint(ratio.astype(np.float32)), -8, 7).astype(np.int8)
    return codes.reshape(weight.shape), scale


def encode(weight: Float[np.ndarray, "*lead rows columns"], group_size: int, rule: ScaleRule) -> Int4:
    """`quantize` and `pack` to the packed matrix that the model runs on."""
    codes, scale = quantize(weight, group_size, rule)
    words = jnp.asarray(pack(codes).view(np.uint32))
    return Int4(packed=words, scale=jnp.asarray(scale), columns=weight.shape[-1], group_size=group_size)
