"""Rotary position embedding with YaRN scaling (Peng et al. 2023, section 3), as DeepSeek-V3 and Qwen3 use it."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Float64, Int

from kdjax.config import YarnConfig


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN eq. 22: m(a) = 0.1 a ln(factor) + 1; 1 where the context is not extended."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def correction_range(dim: int, theta: float, yarn: YarnConfig) -> tuple[int, int]:
    """First and last frequency index of the blend: pairs that turn `beta_fast` and `beta_slow` times in training."""

    def pair_with(turns: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    return max(math.floor(pair_with(yarn.beta_fast)), 0), min(math.ceil(pair_with(yarn.beta_slow)), dim - 1)


def inverse_frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> Float64[np.ndarray, "half"]:
    """Radians per position of each rotary pair (YaRN section 3.2, "NTK-by-parts").

    Fast pairs keep theta^(-2i/dim), slow pairs are divided by `factor`, a linear ramp blends those between.
    """
    base = theta ** (-np.arange(0, dim, 2) / dim)
    if yarn is None:
        return base
    low, high = correction_range(dim, theta, yarn)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return base / yarn.factor * ramp + base * (1.0 - ramp)


def amplitude(yarn: YarnConfig | None) -> float:
    """Factor on cos and sin (config keys `attention_factor`, else `mscale` over `mscale_all_dim`)."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)


def cos_sin(
    positions: Int[np.ndarray, "q"], dim: int, theta: float, yarn: YarnConfig | None
) -> tuple[Float64[np.ndarray, "q half"], Float64[np.ndarray, "q half"]]:
    """cos and sin of every rotary angle, times the amplitude.

    The angle itself is a float32 product in every released implementation. At position 200,000 its rounding is about
    0.01 rad, which the model was trained with: it is part of the definition, so it is kept here.
    """
    frequencies = inverse_frequencies(dim, theta, yarn).astype(np.float32)
    angle = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    return amplitude(yarn) * np.cos(angle), amplitude(yarn) * np.sin(angle)


def rotate_interleaved(
    x: Float[np.ndarray, "q *heads dim"], cos: Float[np.ndarray, "q half"], sin: Float[np.ndarray, "q half"]
) -> Float64[np.ndarray, "q *heads dim"]:
    """Rotates pairs (2i, 2i+1), results in place: DeepSeek-V3 / K2 convention."""
    cos, sin = _over_heads(cos, x.ndim), _over_heads(sin, x.ndim)
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)


def rotate_half_split(
    x: Float[np.ndarray, "q *heads dim"], cos: Float[np.ndarray, "q half"], sin: Float[np.ndarray, "q half"]
) -> Float64[np.ndarray, "q *heads dim"]:
    """Rotates pairs (i, i + dim/2): Llama / Qwen3 convention, used by the drafter."""
    cos, sin = _over_heads(cos, x.ndim), _over_heads(sin, x.ndim)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _over_heads(table: np.ndarray, ndim: int) -> np.ndarray:
    return table.astype(np.float64).reshape(len(table), *[1] * (ndim - 2), -1)
