"""The choice of experts in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32


def choose(
    logits: Float32[Array, "tokens experts"],
    bias: Float32[Array, "experts"],
    *,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
    scores = jax.nn.sigmoid(logits)
    _, indices = lax.top_k(scores + jnp.broadcast_to(bias, scores.shape), top_k)
    weights = jnp.take_along_axis(scores, indices, axis=-1)
    if norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return indices, weights * routed_scaling_factor
