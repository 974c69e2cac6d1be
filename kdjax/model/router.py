"""The sigmoid router of DeepSeek-V3 / K2 ("noaux_tc", one group)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kdjax.config import ModelConfig
from kdjax.model.runtime import Runtime
from pallas_kernels.numerics import matmul_nt


def select(
    logits: Float32[Array, "tokens experts"],
    bias: Float32[Array, "experts"],
    *,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
    """Expert ids by descending biased score (lowest id wins a tie) and their weights. All float32.

    `bias` (config name e_score_correction_bias) only selects; weights come from the unbiased sigmoids. The 1e-20
    keeps them finite where every selected sigmoid underflows.
    """
    scores = jax.nn.sigmoid(logits)
    _, indices = lax.top_k(scores + jnp.broadcast_to(bias, scores.shape), top_k)
    weights = jnp.take_along_axis(scores, indices, axis=-1)
    if norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return indices, weights * routed_scaling_factor


class Router(nnx.Module):
    def __init__(self, config: ModelConfig, runtime: Runtime):
        self.config = config
        self.weight = nnx.Param(jnp.zeros((config.n_routed_experts, config.hidden_size), runtime.dtype))
        self.e_score_correction_bias = nnx.Param(jnp.zeros(config.n_routed_experts, jnp.float32))

    def __call__(
        self, x: Float[Array, "tokens hidden"]
    ) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
        c = self.config
        weight = self.weight.get_value().astype(jnp.float32)
        logits = matmul_nt(x.astype(jnp.float32), weight)
        return select(
            logits,
            self.e_score_correction_bias.get_value(),
            top_k=c.num_experts_per_tok,
            norm_topk_prob=c.norm_topk_prob,
            routed_scaling_factor=c.routed_scaling_factor,
        )
