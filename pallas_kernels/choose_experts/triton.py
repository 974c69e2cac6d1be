"""The choice of experts in Pallas Triton: one warp per token, `top_k` times the best of what is left.

XLA sorts all experts of every token for it, in five kernels.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels.tiles import tile


def choose(
    parts: Float32[Array, "parts tokens columns"],
    bias: Float32[Array, "experts"],
    *,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    interpret: bool,
) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
    tokens = parts.shape[1]
    shape = (tokens, top_k)
    return pl.pallas_call(
        functools.partial(_choose, normalise=norm_topk_prob, scaling=routed_scaling_factor),
        grid=(tokens,),
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        # a step is a chain of reductions: within one warp they need no barrier
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )(parts, bias)


def _choose(parts, bias, indices, weights, *, normalise, scaling):
    token, experts, top_k = pl.program_id(0), bias.shape[0], indices.shape[1]
    expert = jnp.arange(tile(experts), dtype=jnp.int32)
    exists = expert < experts
    load = functools.partial(plgpu.load, mask=exists, other=0.0)
    scores = jax.nn.sigmoid(
        functools.reduce(jnp.add, [load(parts.at[i, token, expert]) for i in range(parts.shape[0])])
    )
    left = jnp.where(exists, scores + load(bias.at[expert]), -jnp.inf)
    rank = jnp.arange(tile(top_k), dtype=jnp.int32)
    chosen, chosen_scores = jnp.zeros_like(rank), jnp.zeros(rank.shape, jnp.float32)
    for k in range(top_k):
        best = jnp.max(left)
        # not beyond the experts where nothing equals the best, which is NaN
        winner = jnp.minimum(jnp.min(jnp.where(left == best, expert, experts - 1)), experts - 1)
        is_winner = expert == winner
        score = jnp.sum(jnp.where(is_winner, scores, 0.0))
        left = jnp.where(is_winner, -jnp.inf, left)
        chosen = jnp.where(rank == k, winner, chosen)
        chosen_scores = jnp.where(rank == k, score, chosen_scores)
    if normalise:
        chosen_scores = chosen_scores / (jnp.sum(chosen_scores) + 1e-20)
    plgpu.store(indices.at[token, rank], chosen, mask=rank < top_k)
    plgpu.store(weights.at[token, rank], chosen_scores * scaling, mask=rank < top_k)
