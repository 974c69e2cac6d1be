"""The choice of a token's experts by the sigmoid router of DeepSeek-V3 / K2 ("noaux_tc", one group)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.choose_experts import triton, xla

BACKENDS = ("xla", "triton", "interpret")


def choose_experts(
    logits: Float32[Array, "*parts tokens columns"],
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

    Args:
        logits: those of the experts in the first columns; with a dimension in front, a power of two of partial
            sums (`split_matmul_nt`).
        bias: as many as there are experts.
        top_k: experts per token.
        norm_topk_prob: whether the weights of a token are divided by their sum.
        routed_scaling_factor: on the weights.
        backend: "xla", "triton" (NVIDIA GPUs) or "interpret".

    Raises:
        NotImplementedError: the backend is not supported.
    """
    if backend not in BACKENDS:
        raise NotImplementedError(f"choose_experts: {backend=} is not supported; supported: {', '.join(BACKENDS)}")
    rule: Any = dict(top_k=top_k, norm_topk_prob=norm_topk_prob, routed_scaling_factor=routed_scaling_factor)
    if backend == "xla":
        return xla.choose(jnp.sum(_as_parts(logits), axis=0)[:, : bias.shape[0]], bias, **rule)
    return triton.choose(_as_parts(logits), bias, **rule, interpret=backend == "interpret")


def choose_and_activate(
    parts: Float32[Array, "parts product_rows columns"],
    bias: Float32[Array, "experts"],
    x: Float[Array, "tokens hidden"],
    norm_weight: Float[Array, "hidden"],
    *,
    eps: float,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    backend: str,
) -> tuple[
    Int32[Array, "tokens top_k"],
    Float32[Array, "tokens top_k"],
    Float[Array, "tokens inner"],
    Float[Array, "tokens hidden"],
]:
    """`choose_experts`, silu(gate) * up of the shared experts and the normed x of the routed ones, in one kernel.

    Args:
        parts: partial sums of router, gate and up side by side (`split_matmul_nt`) with x times the weight of its norm.
            Its rows are divided by the root mean square of those of x here.
        x: the tokens before the norm; gate and up are rounded to its dtype, as is silu(gate).
        norm_weight: of the norm.
        eps: of the norm.
        backend: "triton" (NVIDIA GPUs) or "interpret".

    The others are as those of `choose_experts`.

    Raises:
        NotImplementedError: the backend is not supported.
    """
    if backend not in BACKENDS[1:]:
        supported = ", ".join(BACKENDS[1:])
        raise NotImplementedError(f"choose_and_activate: {backend=} is not supported; supported: {supported}")
    rule: Any = dict(top_k=top_k, norm_topk_prob=norm_topk_prob, routed_scaling_factor=routed_scaling_factor)
    return triton.choose_and_activate(parts, bias, x, norm_weight, eps=eps, **rule, interpret=backend == "interpret")


def _as_parts(logits: Float32[Array, "*parts tokens columns"]) -> Float32[Array, "_ tokens columns"]:
    return logits if logits.ndim == 3 else logits[None]
