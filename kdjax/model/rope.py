"""Rotary position embedding with YaRN scaling (Peng et al., "YaRN", as in the DeepSeek-V3 modeling file)."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kdjax.config import YarnConfig


def correction_range(dim: int, theta: float, yarn: YarnConfig) -> tuple[int, int]:
    """First and last frequency index of the ramp between kept and interpolated frequencies."""

    def index(rotations: float) -> float:
        period = yarn.original_max_position_embeddings / (2 * math.pi * rotations)
        return dim * math.log(period) / (2 * math.log(theta))

    return max(math.floor(index(yarn.beta_fast)), 0), min(math.ceil(index(yarn.beta_slow)), dim - 1)


def inverse_frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> np.ndarray:
    """[dim / 2] float32, in radians per position; computed in float64 and rounded once."""
    extrapolated = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if yarn is None:
        return extrapolated.astype(np.float32)
    low, high = correction_range(dim, theta, yarn)
    ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    return (extrapolated / yarn.factor * ramp + extrapolated * (1.0 - ramp)).astype(np.float32)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def amplitude(yarn: YarnConfig | None) -> float:
    """Factor on cos and sin: `attention_factor` where given, else m(mscale) / m(mscale_all_dim)."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)


def mla_softmax_scale(qk_head_dim: int, yarn: YarnConfig | None) -> float:
    """qk_head_dim^-0.5 * m(mscale_all_dim)^2. The DFlash drafter's scale has no mscale factor: not this function."""
    return qk_head_dim**-0.5 * (1.0 if yarn is None else _mscale(yarn.factor, yarn.mscale_all_dim) ** 2)


def cos_sin(
    positions: Int[Array, "*lead"], inv_freq: Float[np.ndarray, "half"], amplitude: float
) -> tuple[Float[Array, "*lead half"], Float[Array, "*lead half"]]:
    """float32; the angle is float32(position) * float32(inv_freq), as every reference implementation has it."""
    pos = positions.astype(jnp.float32)[..., None]
    angle = pos * jnp.asarray(inv_freq).reshape((1,) * positions.ndim + (-1,))
    return jnp.cos(angle) * amplitude, jnp.sin(angle) * amplitude


def rotate_interleaved(
    x: Float[Array, "*lead width"], cos: Float[Array, "*lead half"], sin: Float[Array, "*lead half"]
) -> Float[Array, "*lead width"]:
    """Rotate pairs (2i, 2i + 1), the K2 convention. The result keeps the interleaved order and the dtype of `x`."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def rotate_interleaved_heads(
    x: Float[Array, "slots q heads width"], cos: Float[Array, "slots q half"], sin: Float[Array, "slots q half"]
) -> Float[Array, "slots q heads width"]:
    """`rotate_interleaved`, every head alike."""
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    return rotate_interleaved(x, *(jnp.broadcast_to(a[:, :, None, :], shape) for a in (cos, sin)))


def rotate_half_split(
    x: Float[Array, "*lead width"], cos: Float[Array, "*lead half"], sin: Float[Array, "*lead half"]
) -> Float[Array, "*lead width"]:
    """Rotate pairs (i, i + width / 2), the Qwen3 / DFlash convention."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
