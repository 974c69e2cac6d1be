"""Muon for matrices, Adam for the rest, and the learning-rate shape of a run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers, muon

from experiments.nano.config import OptimizerConfig

ADAM_ONLY = ("embed_tokens", "lm_head", "gate")


def _muon_axes(params: Any) -> Any:
    """Weights are [..., out, in]; leading axes (experts) are orthogonalised separately."""

    def axes(path: tuple, leaf: Array) -> MuonDimensionNumbers | None:
        names = [getattr(k, "key", None) for k in path]
        if leaf.ndim < 2 or any(n in ADAM_ONLY for n in names):
            return None
        return MuonDimensionNumbers(reduction_axis=leaf.ndim - 1, output_axis=leaf.ndim - 2)

    return jax.tree_util.tree_map_with_path(axes, params)


def optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """At peak learning rate; the trainer multiplies the updates by `schedule`.

    `consistent_rms=0.2` gives Muon's updates the size of Adam's (Moonlight, section 2.2).
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        muon(
            config.muon_lr,
            weight_decay=config.weight_decay,
            adam_b2=0.95,
            adam_learning_rate=config.adam_lr,
            muon_weight_dimension_numbers=_muon_axes,
            consistent_rms=0.2,
        ),
    )


def schedule(config: OptimizerConfig, progress: Float[Array, ""]) -> Float[Array, ""]:
    """Factor on the learning rate at `progress` (0..1): linear warm-up, constant, linear decay to zero."""
    warm = progress / config.warmup
    decay = (1.0 - progress) / (1.0 - config.decay_from)
    return jnp.clip(jnp.minimum(warm, decay), 0.0, 1.0)
