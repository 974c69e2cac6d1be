"""Exact sums of log-probabilities.

A cost is -lp in fixed point: 4 limbs of 24 bits, unit 2^-76, so costs below 2^16 are exact down to 2^-53 with a full
float32 mantissa, sums of 15 need no carry out of the highest limb, and every limb is exact in float32.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

LIMBS = 4
LIMB_BITS = 24
LIMB_MASK = np.uint32(2**LIMB_BITS - 1)
_UNIT_EXPONENT = 76
_COST_CAP = np.nextafter(np.float32(2.0**16), np.float32(0))


def limbs(lp: Float[Array, "*shape"]) -> list[UInt32[Array, "*shape"]]:
    """-lp, most significant limb first. Rounded towards zero and capped below 2^16."""
    cost = jnp.minimum(jnp.maximum(-lp, np.float32(0)), _COST_CAP)
    bits = lax.bitcast_convert_type(cost, jnp.uint32)
    exponent = (bits >> np.uint32(23)).astype(jnp.int32)
    mantissa = jnp.where(exponent > 0, (bits & np.uint32(0x7FFFFF)) | np.uint32(0x800000), np.uint32(0))
    shift = exponent - 150 + _UNIT_EXPONENT  # cost = mantissa * 2^(exponent - 150)
    found = []
    for i in reversed(range(LIMBS)):
        by = shift - i * LIMB_BITS
        left = mantissa << jnp.clip(by, 0, 31).astype(jnp.uint32)
        right = mantissa >> jnp.clip(-by, 0, 31).astype(jnp.uint32)
        found.append(jnp.where(by >= LIMB_BITS, np.uint32(0), jnp.where(by >= 0, left, right) & LIMB_MASK))
    return found
