"""YaRN inverse frequencies and the MLA softmax scale, in NumPy."""

from __future__ import annotations

import math

import numpy as np

from kdjax.config.model import ModelConfig, YarnConfig


def inverse_frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> np.ndarray:
    extrapolated = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if yarn is None:
        return extrapolated.astype(np.float32)

    def correction(rotations: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return (extrapolated / yarn.factor * ramp + extrapolated * (1 - ramp)).astype(np.float32)


def softmax_scale(config: ModelConfig) -> float:
    scale = config.qk_head_dim**-0.5
    if config.rope_scaling is not None and config.rope_scaling.mscale_all_dim:
        m = 0.1 * config.rope_scaling.mscale_all_dim * math.log(config.rope_scaling.factor) + 1.0
        scale *= m * m
    return scale
