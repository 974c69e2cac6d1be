"""The choice of experts in Pallas Triton: one program per token, `top_k` times the best of what is left.

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

from pallas_kernels.tiles import inverse_rms, tile, total

COLUMNS = 256
"""Of the shared experts' activation, per program."""
WARPS = 4
"""The choice is a chain of reductions, which more warps lengthen, after a load of all partial sums, which few are slow
at."""


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

    return _call(kernel, 1, _choice(parts.shape[1], top_k), interpret)(parts, bias)


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
    interpret: bool,
) -> tuple[
    Int32[Array, "tokens top_k"],
    Float32[Array, "tokens top_k"],
    Float[Array, "tokens inner"],
    Float[Array, "tokens hidden"],
]:
    inner = (parts.shape[2] - bias.shape[0]) // 2
    rule = functools.partial(_choose, normalise=norm_topk_prob, scaling=routed_scaling_factor)

    def kernel(parts, bias, x, norm_weight, indices, weights, activated, normed):
        token, program = pl.program_id(0), pl.program_id(1)  # interpret mode has none inside of a branch
        scale = inverse_rms(x, token, eps)
        pl.when(program == 0)(lambda: rule(token, parts, bias, indices, weights, scale))
        pl.when(program == 1)(lambda: _normalise(token, x, norm_weight, scale, normed))
        pl.when(program > 1)(lambda: _activate(token, parts, scale, bias.shape[0], program - 2, activated))

    values = (jax.ShapeDtypeStruct((x.shape[0], size), x.dtype) for size in (inner, x.shape[1]))
    programs = 2 + pl.cdiv(inner, COLUMNS)
    return _call(kernel, programs, (*_choice(x.shape[0], top_k), *values), interpret)(parts, bias, x, norm_weight)


def _choice(tokens: int, top_k: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct((tokens, top_k), dtype) for dtype in (jnp.int32, jnp.float32))


def _call(kernel: Callable[..., None], programs: int, out: tuple[jax.ShapeDtypeStruct, ...], interpret: bool) -> Any:
    return pl.pallas_call(
        kernel,
        grid=(out[0].shape[0], programs),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )


def _normalise(token, x, norm_weight, scale, normed):
    column = jnp.arange(tile(x.shape[1]), dtype=jnp.int32)
    inside = column < x.shape[1]
    row = plgpu.load(x.at[token, column], mask=inside, other=0.0).astype(jnp.float32)
    weight = plgpu.load(norm_weight.at[column], mask=inside, other=0.0).astype(jnp.float32)
    value = ((row * scale).astype(x.dtype).astype(jnp.float32) * weight).astype(normed.dtype)
    # interpret mode also writes where the mask is off: out of bounds then
    plgpu.store(normed.at[token, jnp.where(inside, column, x.shape[1])], value, mask=inside)


def _activate(token, parts, scale, experts, program, activated):
    """silu(gate) * up of some columns: those of gate follow the experts, those of up follow them."""
    inner, dtype = activated.shape[1], activated.dtype
    column = program * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
    inside = column < inner
    gate, up = (total(parts, token, first + column, inside, dtype, scale) for first in (experts, experts + inner))
    gate = (gate * jax.nn.sigmoid(gate)).astype(dtype)
    # interpret mode also writes where the mask is off: out of bounds then
    value = (gate.astype(jnp.float32) * up).astype(dtype)
    plgpu.store(activated.at[token, jnp.where(inside, column, inner)], value, mask=inside)


def _choose(token, parts, bias, indices, weights, scale: Any = 1.0, *, normalise, scaling):
    experts, top_k = bias.shape[0], indices.shape[1]
    expert = jnp.arange(tile(experts), dtype=jnp.int32)
    exists = expert < experts
    scores = jax.nn.sigmoid(total(parts, token, expert, exists, jnp.float32, scale))
    biased = scores + plgpu.load(bias.at[expert], mask=exists, other=0.0)
    left = jnp.where(exists & (biased == biased), biased, -jnp.inf)  # NaN would be chosen again and again
    rank = jnp.arange(tile(top_k), dtype=jnp.int32)
    chosen, chosen_scores = jnp.zeros_like(rank), jnp.zeros(rank.shape, jnp.float32)
    for k in range(top_k):
        # not beyond the experts where all that is left is NaN
        winner = jnp.minimum(jnp.argmax(left).astype(jnp.int32), experts - 1)
        is_winner = expert == winner
        score = jnp.sum(jnp.where(is_winner, scores, 0.0))
        left = jnp.where(is_winner, -jnp.inf, left)
        chosen = jnp.where(rank == k, winner, chosen)
        chosen_scores = jnp.where(rank == k, score, chosen_scores)
    if normalise:
        chosen_scores = chosen_scores / (jnp.sum(chosen_scores) + 1e-20)
    plgpu.store(indices.at[token, rank], chosen, mask=rank < top_k)
    plgpu.store(weights.at[token, rank], chosen_scores * scaling, mask=rank < top_k)
