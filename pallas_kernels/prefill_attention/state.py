"""The running softmax between segments of the prefix."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32

from pallas_kernels.tiles import LOWEST_PEAK


class State(NamedTuple):
    """Weighted sum of values, largest score in log2 units, sum of weights relative to it."""

    acc: Float32[Array, "slots q heads v"]
    peak: Float32[Array, "slots q heads"]
    total: Float32[Array, "slots q heads"]

    @classmethod
    def empty(cls, slots: int, q: int, heads: int, v: int) -> State:
        shape = (slots, q, heads)
        return cls(
            jnp.zeros((*shape, v), jnp.float32),
            jnp.full(shape, LOWEST_PEAK, jnp.float32),
            jnp.zeros(shape, jnp.float32),
        )
