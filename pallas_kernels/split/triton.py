"""The product of few tokens in Pallas Triton, with the scaling of its columns: in a loop XLA makes a kernel of that."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32

from pallas_kernels.tiles import dot

MOST_TOKENS = 16
BLOCK = 128
"""Columns per step."""
ROWS = 32
"""Of the weight, per program."""
PROGRAMS = 512
"""From which on a GPU is busy."""
STAGES = 5


def fits(tokens: int, width: int) -> bool:
    return tokens <= MOST_TOKENS and width % BLOCK == 0


def split_matmul_nt(
    x: Float[Array, "tokens width"],
    weights: Sequence[Float[Array, "_ width"]],
    column_scale: Float[Array, "width"] | None,
    *,
    interpret: bool,
    rows: int = ROWS,
    programs: int = PROGRAMS,
    stages: int = STAGES,
    warps: int = 4,
) -> Float32[Array, "parts tokens out"]:
    tokens, width = x.shape
    blocks = [pl.cdiv(weight.shape[0], rows) for weight in weights]
    steps, parts = width // BLOCK, 1
    while sum(blocks) * parts < programs and steps % (2 * parts) == 0:
        parts *= 2
    scales = () if column_scale is None else (column_scale,)
    return pl.pallas_call(
        functools.partial(_few_tokens, blocks=blocks, rows=rows, steps=steps // parts),
        grid=(sum(blocks), parts),
        out_shape=jax.ShapeDtypeStruct((parts, tokens, sum(weight.shape[0] for weight in weights)), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="few_tokens",
    )(x, *weights, *scales)


def _few_tokens(x_ref, *refs, blocks, rows, steps):
    weights, scales, out = refs[: len(blocks)], refs[len(blocks) : -1], refs[-1]
    block, part = pl.program_id(0), pl.program_id(1)  # interpret mode has none inside of a branch
    tokens = x_ref.shape[0]
    token = jnp.arange(max(8, pl.next_power_of_2(tokens)), dtype=jnp.int32)
    held = jnp.minimum(token, tokens - 1)[:, None]

    def multiply(weight, first_block, first_row):
        row = (block - first_block) * rows + jnp.arange(rows, dtype=jnp.int32)
        read = jnp.minimum(row, weight.shape[0] - 1)[:, None]

        def step(i, total):
            column = (part * steps + i) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
            x = plgpu.load(x_ref.at[held, column[None, :]])
            for scale in scales:
                x = x * jnp.broadcast_to(plgpu.load(scale.at[column])[None, :], x.shape)
            return total + dot(plgpu.load(weight.at[read, column[None, :]]), x.T)

        total = lax.fori_loop(0, steps, step, jnp.zeros((rows, token.shape[0]), jnp.float32))
        mask = (row < weight.shape[0])[:, None] & (token < tokens)[None, :]
        # interpret mode also writes where the mask is off: out of bounds then
        place = jnp.where(mask, first_row + row[:, None], out.shape[2])
        plgpu.store(out.at[part, token[None, :], place], total, mask=mask)

    first_blocks = itertools.accumulate([0, *blocks])
    first_rows = itertools.accumulate([0, *(weight.shape[0] for weight in weights)])
    for weight, count, first_block, first_row in zip(weights, blocks, first_blocks, first_rows, strict=False):
        here = (block >= first_block) & (block < first_block + count)
        pl.when(here)(functools.partial(multiply, weight, first_block, first_row))
