"""Values that damage leaves behind and that no quantiser or training would write."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# A scale is max|w| / 7 of its group; published ones lie below 1.
LARGEST_SCALE = ml_dtypes.bfloat16(1024)

_EXPONENT = {2: (np.uint16, 0x7F80), 4: (np.uint32, 0x7F800000)}


def check_scales(scale: np.ndarray) -> str | None:
    """What is wrong with bfloat16 scales. Zero is a scale: that of a group of zeros."""
    # As unsigned integers the non-negative numbers are in order, and negative ones, infinities and NaN above them.
    bits = scale.view(np.uint16)
    if bits.size == 0 or bits.max() <= LARGEST_SCALE.view(np.uint16):
        return None
    bad = bits > LARGEST_SCALE.view(np.uint16)
    row = np.argwhere(bad)[0]
    return f"has {bad.sum()} scales that are NaN, negative or above {LARGEST_SCALE}, first {scale[tuple(row)]}"


def check_weights(weight: np.ndarray) -> str | None:
    """What is wrong with bfloat16 or float32 weights."""
    kind, exponent = _EXPONENT[weight.dtype.itemsize]
    bits = weight.view(kind)
    # In pieces that stay in the cache: this runs on every byte that is not INT4.
    flat = bits.reshape(-1)
    step = 1 << 16
    count = sum(
        int(np.count_nonzero((flat[i : i + step] & kind(exponent)) == kind(exponent)))
        for i in range(0, flat.size, step)
    )
    return f"has {count} entries that are NaN or infinite" if count else None
