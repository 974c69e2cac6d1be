"""The choice of experts in Pallas Triton: one warp per token, `top_k` times the best of what is left.

XLA sorts all experts of every token for it, in five kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.tiles import tile, total

COLUMNS = 256
"""Of the shared experts' activation, per program."""


def choose(
    parts: Float32[Array, "parts tokens columns"],
    bias: Float32[Array, "experts"],
    *,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    interpret: bool,
) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
    rule = functools.partial(_choose, normalise=norm_topk_prob, scaling=routed_scaling_factor)

    def kernel(*refs):
        rule(pl.program_id(0), *refs)

    return _call(kernel, 1, _choice(parts, top_k), interpret)(parts, bias)


def choose_and_activate(
    parts: Float32[Array, "parts tokens columns"],
    bias: Float32[Array, "experts"],
    *,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    dtype: jnp.dtype,
    interpret: bool,
) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"], Float[Array, "tokens inner"]]:
    _, tokens, columns = parts.shape
    inner = (columns - bias.shape[0]) // 2
    rule = functools.partial(_choose, normalise=norm_topk_prob, scaling=routed_scaling_factor)

    def kernel(parts, bias, indices, weights, activated):
        token, program = pl.program_id(0), pl.program_id(1)  # interpret mode has none inside of a branch
        pl.when(program == 0)(lambda: rule(token, parts, bias, indices, weights))
        pl.when(program > 0)(lambda: _activate(token, parts, bias.shape[0], program - 1, activated))

    out = (*_choice(parts, top_k), jax.ShapeDtypeStruct((tokens, inner), dtype))
    return _call(kernel, 1 + pl.cdiv(inner, COLUMNS), out, interpret)(parts, bias)


def _choice(parts: Array, top_k: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct((parts.shape[1], top_k), dtype) for dtype in (jnp.int32, jnp.float32))


def _call(kernel: Callable[..., None], programs: int, out: tuple[jax.ShapeDtypeStruct, ...], interpret: bool) -> Any:
    return pl.pallas_call(
        kernel,
        grid=(out[0].shape[0], programs),
        out_shape=out,
        # a step of the choice is a chain of reductions: within one warp they need no barrier
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )


def _activate(token, parts, experts, program, activated):
    """silu(gate) * up of some columns: those of gate follow the experts, those of up follow them."""
    inner, dtype = activated.shape[1], activated.dtype
    column = program * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
    inside = column < inner
    gate, up = (total(parts, token, first + column, inside, dtype) for first in (experts, experts + inner))
    gate = (gate * jax.nn.sigmoid(gate)).astype(dtype)
    # interpret mode also writes where the mask is off: out of bounds then
    value = (gate.astype(jnp.float32) * up).astype(dtype)
    plgpu.store(activated.at[token, jnp.where(inside, column, inner)], value, mask=inside)


def _choose(token, parts, bias, indices, weights, *, normalise, scaling):
    experts, top_k = bias.shape[0], indices.shape[1]
    expert = jnp.arange(tile(experts), dtype=jnp.int32)
    exists = expert < experts
    scores = jax.nn.sigmoid(total(parts, token, expert, exists, jnp.float32))
    left = jnp.where(exists, scores + plgpu.load(bias.at[expert], mask=exists, other=0.0), -jnp.inf)
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
