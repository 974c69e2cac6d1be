"""Numeric conventions shared by the ops."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def precision(dtype: jnp.dtype) -> lax.Precision:
    """Float32 matmuls are exact float32 (no TF32); narrower ones use the hardware default."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
