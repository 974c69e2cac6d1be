"""Rows of tokens brought into the order of their experts, and back, for kernels that cannot gather."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, BFloat16, Float, Int32

CHUNK = 1024


def gather(
    x: BFloat16[Array, "tokens width"],
    expert_of_group: Int32[Array, "groups"],
    places: Int32[Array, "places"],
    top_k: int,
    *,
    interpret: bool,
) -> tuple[BFloat16[Array, "places width"], Int32[Array, "assignments"]]:
    """The row of each place of `align`'s groups, and the place of each assignment.

    Rows of empty places stay unwritten, as does the place of an assignment that has none.
    """
    groups, width = expert_of_group.shape[0], x.shape[1]
    kernel = pl.pallas_call(
        functools.partial(_gather, top_k=top_k, width=width),
        grid=(places.shape[0] // groups, groups),
        out_shape=[
            jax.ShapeDtypeStruct((places.shape[0], width), x.dtype),
            jax.ShapeDtypeStruct((x.shape[0] * top_k,), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="int4_experts_gather",
    )
    rows, position = kernel(x, expert_of_group, places)
    return rows, position


def _gather(x_ref, experts_ref, places_ref, rows_ref, position_ref, *, top_k: int, width: int):
    group = pl.program_id(1)
    place = group * pl.num_programs(0) + pl.program_id(0)

    @pl.when(experts_ref[group] >= 0)
    def _():
        assignment = places_ref[place]

        @pl.when(assignment >= 0)
        def _():
            position_ref[assignment] = place
            token = assignment // top_k
            chunks = [_chunk(first, width) for first in range(0, width, CHUNK)]
            loaded = [plgpu.load(x_ref.at[token, columns], mask=mask) for columns, mask in chunks]
            for (columns, mask), values in zip(chunks, loaded, strict=True):
                plgpu.store(rows_ref.at[place, columns], values, mask=mask)


def weighted_sum(
    rows: BFloat16[Array, "places width"],
    position: Int32[Array, "assignments"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    experts: int,
    *,
    interpret: bool,
) -> BFloat16[Array, "tokens width"]:
    """Of the rows of each token's assignments, without those to experts that are not here."""
    tokens, top_k = indices.shape
    width = rows.shape[1]
    return pl.pallas_call(
        functools.partial(_weighted_sum, experts=experts, top_k=top_k, width=width),
        grid=(pl.cdiv(width, CHUNK), tokens),
        out_shape=jax.ShapeDtypeStruct((tokens, width), rows.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="int4_experts_weighted_sum",
    )(rows, position, indices.reshape(-1), weights.reshape(-1).astype(jnp.float32))


def _weighted_sum(rows_ref, position_ref, experts_ref, weights_ref, out_ref, *, experts: int, top_k: int, width: int):
    token = pl.program_id(1)
    columns, mask = _chunk(pl.program_id(0) * CHUNK, width)
    total = jnp.zeros(CHUNK, jnp.float32)
    for k in range(top_k):
        assignment = token * top_k + k
        expert = experts_ref[assignment]
        here = (expert >= 0) & (expert < experts)
        place = jnp.where(here, position_ref[assignment], 0)
        row = plgpu.load(rows_ref.at[place, columns], mask=mask & here, other=0.0)
        total += row.astype(jnp.float32) * weights_ref[assignment]
    plgpu.store(out_ref.at[token, columns], total.astype(out_ref.dtype), mask=mask)


def _chunk(first, width: int):
    columns = first + jnp.arange(CHUNK, dtype=jnp.int32)
    return columns, columns < width
