"""The router: scores of all experts, and the choice among them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from kdjax.config import ModelConfig
from kdjax.model.norm import RMSNorm
from kdjax.model.runtime import Runtime
from pallas_kernels.choose_experts import choose_and_activate, choose_experts
from pallas_kernels.numerics import matmul_nt
from pallas_kernels.split import split_matmul_nt


class Router(nnx.Module):
    """`choose_experts` on the float32 product with `gate.weight` [experts, hidden]: experts and weights per token."""

    def __init__(self, config: ModelConfig, runtime: Runtime):
        self.config, self.backend = config, runtime.backend
        self.weight = nnx.Param(jnp.zeros((config.n_routed_experts, config.hidden_size), runtime.dtype))
        self.e_score_correction_bias = nnx.Param(jnp.zeros(config.n_routed_experts, jnp.float32))

    def __call__(
        self, x: Float[Array, "tokens hidden"]
    ) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
        weight = self.weight.get_value()
        # Products of bfloat16 are exact in float32, so only the sum, which is float32, rounds.
        if self.backend == "xla":
            return self.choose(matmul_nt(x.astype(weight.dtype), weight, jnp.dtype(jnp.float32)))
        indices, weights = self.choose(split_matmul_nt(x.astype(weight.dtype), weight))
        return indices[: x.shape[0]], weights[: x.shape[0]]

    def choose(
        self, logits: Float32[Array, "*parts tokens columns"]
    ) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
        """Of the product, or its partial sums."""
        return choose_experts(logits, self.e_score_correction_bias.get_value(), **self.rule)

    def choose_and_activate(
        self, parts: Float32[Array, "parts tokens columns"], x: Float[Array, "tokens hidden"], norm: RMSNorm
    ) -> tuple[
        Int32[Array, "tokens top_k"],
        Float32[Array, "tokens top_k"],
        Float[Array, "tokens inner"],
        Float[Array, "tokens hidden"],
    ]:
        """`choose`, the activations of shared experts, whose gate and up stand beside the router in the product, and
        norm(x)."""
        bias, weight = self.e_score_correction_bias.get_value(), norm.weight.get_value()
        return choose_and_activate(parts, bias, x, weight, eps=norm.eps, **self.rule)

    @property
    def rule(self) -> dict[str, Any]:
        """How experts are chosen."""
        return {
            "top_k": self.config.num_experts_per_tok,
            "norm_topk_prob": self.config.norm_topk_prob,
            "routed_scaling_factor": self.config.routed_scaling_factor,
            "backend": self.backend,
        }
