"""The choice of a token's experts by the sigmoid router of DeepSeek-V3 / K2 ("noaux_tc", one group)."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float32, Int32

from pallas_kernels.choose_experts import triton, xla

BACKENDS = ("xla", "triton", "interpret")


def choose_experts(
    logits: Float32[Array, "tokens experts"],
    bias: Float32[Array, "experts"],
    *,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    backend: str,
) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
    """Expert ids by descending biased score (lowest id wins a tie) and their weights. All float32.

    `bias` (config name e_score_correction_bias) only selects; weights come from the unbiased sigmoids. The 1e-20
    keeps them finite where every selected sigmoid underflows.

    Raises:
        NotImplementedError: the backend is not supported.
    """
    if backend not in BACKENDS:
        raise NotImplementedError(f"choose_experts: {backend=} is not supported; supported: {', '.join(BACKENDS)}")
    rule: Any = dict(top_k=top_k, norm_topk_prob=norm_topk_prob, routed_scaling_factor=routed_scaling_factor)
    if backend == "xla":
        return xla.choose(logits, bias, **rule)
    return triton.choose(logits, bias, **rule, interpret=backend == "interpret")
