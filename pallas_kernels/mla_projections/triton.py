"""The kernels in Pallas Triton. They add up partial sums as they read them, and read `kv_b_proj` where it lies."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.tiles import SMALLEST_DOT, dot, inverse_rms, load, tile, total

TOKENS = SMALLEST_DOT
"""Per program of the products."""
LATENT_COLUMNS = 64
VALUE_COLUMNS = 16


def compress(
    parts: Float32[Array, "parts product_rows q_rank_and_width"],
    x: Float[Array, "tokens hidden"],
    q_weight: Float[Array, "q_rank"],
    kv_weight: Float[Array, "rank"],
    cos: Float32[Array, "tokens half"],
    sin: Float32[Array, "tokens half"],
    cache_rows: Float[Array, "slots rows width"],
    row: Int32[Array, "tokens"],
    *,
    x_eps: float,
    eps: float,
    interpret: bool,
) -> tuple[Float[Array, "tokens q_rank"], Float[Array, "slots rows width"]]:
    tokens = row.shape[0]
    return pl.pallas_call(
        functools.partial(_compress, x_eps=x_eps, eps=eps, per_slot=tokens // cache_rows.shape[0]),
        grid=(tokens, 2),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, q_weight.shape[0]), q_weight.dtype),
            jax.ShapeDtypeStruct(cache_rows.shape, cache_rows.dtype),
        ),
        input_output_aliases={7: 1},
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="mla_compress",
    )(row, parts, x, q_weight, kv_weight, cos, sin, cache_rows)


def absorb_queries(
    parts: Float32[Array, "parts product_rows heads_by_nope_and_rope"],
    kv_b: Float[Array, "heads nope_and_v rank"],
    cos: Float32[Array, "tokens half"],
    sin: Float32[Array, "tokens half"],
    *,
    interpret: bool,
) -> tuple[Float[Array, "tokens heads rank"], Float[Array, "tokens heads rope"]]:
    (heads, _, rank), (tokens, half) = kv_b.shape, cos.shape
    latent_programs = pl.cdiv(rank, LATENT_COLUMNS)
    return pl.pallas_call(
        functools.partial(_absorb_queries, latent_programs=latent_programs),
        grid=(heads, latent_programs + 1, pl.cdiv(tokens, TOKENS)),
        out_shape=tuple(jax.ShapeDtypeStruct((tokens, heads, n), kv_b.dtype) for n in (rank, 2 * half)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="mla_absorb_queries",
    )(parts, kv_b, cos, sin)


def expand_values(
    latent: Float[Array, "tokens heads rank"], kv_b: Float[Array, "heads nope_and_v rank"], v: int, *, interpret: bool
) -> Float[Array, "tokens heads v"]:
    tokens, heads, _ = latent.shape
    return pl.pallas_call(
        _expand_values,
        grid=(heads, pl.cdiv(v, VALUE_COLUMNS), pl.cdiv(tokens, TOKENS)),
        out_shape=jax.ShapeDtypeStruct((tokens, heads, v), latent.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="mla_expand_values",
    )(latent, kv_b)


def _compress(row_ref, parts, x_ref, q_weight, kv_weight, cos, sin, _, q, cache, *, x_eps, eps, per_slot):
    token, dtype = pl.program_id(0), q.dtype
    scale = inverse_rms(x_ref, token, x_eps)
    q_rank, rank, half = q_weight.shape[0], kv_weight.shape[0], cos.shape[1]

    @pl.when(pl.program_id(1) == 0)
    def _():
        column, inside = _columns(q_rank)
        x = total(parts, token, column, inside, dtype, scale)
        _store(q, (token,), column, _rms_norm(x, q_weight, column, inside, eps), inside)

    @pl.when(pl.program_id(1) == 1)
    def _():
        row = row_ref[token]
        at, exists = (token // per_slot, row), row < cache.shape[1]
        column, inside = _columns(rank)
        x = total(parts, token, q_rank + column, inside, dtype, scale)
        _store(cache, at, column, _rms_norm(x, kv_weight, column, inside, eps), inside & exists)
        pair, inside = _columns(half)
        rotated = _rotated(parts, token, q_rank + rank, pair, inside, cos, sin, dtype, scale)
        for i, x in enumerate(rotated):
            _store(cache, at, rank + 2 * pair + i, x, inside & exists)


def _absorb_queries(parts, kv_b, cos, sin, q_latent, q_rope, *, latent_programs):
    head, program = pl.program_id(0), pl.program_id(1)
    token = pl.program_id(2) * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
    (tokens, _, rank), half, dtype = q_latent.shape, cos.shape[1], q_latent.dtype
    nope = parts.shape[2] // kv_b.shape[0] - 2 * half
    first = head * (nope + 2 * half)
    exists = (token < tokens)[:, None]
    held = jnp.minimum(token, tokens - 1)[:, None]

    @pl.when(program < latent_programs)
    def _():
        column, inside = _columns(nope)
        q = total(parts, held, first + column[None, :], exists & inside[None, :], dtype).astype(dtype)
        latent = program * LATENT_COLUMNS + jnp.arange(LATENT_COLUMNS, dtype=jnp.int32)[None, :]
        # rows beyond W_UK are finite and times zero; a clamped column would be loaded on its own
        at = kv_b.at[head, jnp.minimum(column, nope - 1)[:, None], latent]
        mask = jnp.broadcast_to(latent < rank, (column.shape[0], LATENT_COLUMNS))
        absorbed = dot(q, plgpu.load(at, mask=mask, other=0.0))
        _store(q_latent, (token[:, None], head), latent, absorbed, exists & (latent < rank))

    @pl.when(program == latent_programs)
    def _():
        pair, inside = _columns(half)
        inside = exists & inside[None, :]
        rotated = _rotated(parts, held, first + nope, pair[None, :], inside, cos, sin, dtype)
        for i, x in enumerate(rotated):
            _store(q_rope, (token[:, None], head), 2 * pair[None, :] + i, x, inside)


def _expand_values(latent, kv_b, out):
    head, program = pl.program_id(0), pl.program_id(1)
    token = pl.program_id(2) * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
    tokens, _, rank = latent.shape
    v = out.shape[2]
    column = program * VALUE_COLUMNS + jnp.arange(VALUE_COLUMNS, dtype=jnp.int32)
    w = load(kv_b, (head,), kv_b.shape[1] - v + jnp.minimum(column, v - 1), (), 0, rank)
    x = load(latent, (), jnp.minimum(token, tokens - 1), (head,), 0, rank)
    exists = (token < tokens)[:, None] & (column < v)[None, :]
    _store(out, (token[:, None], head), column[None, :], dot(x, w.T), exists)


def _columns(size: int):
    column = jnp.arange(tile(size), dtype=jnp.int32)
    return column, column < size


def _rms_norm(x, weight, column, inside, eps):
    normed = x * lax.rsqrt(jnp.sum(x * x) / weight.shape[0] + eps)
    scale = plgpu.load(weight.at[column], mask=inside, other=0.0)
    return normed.astype(weight.dtype).astype(jnp.float32) * scale.astype(jnp.float32)


def _rotated(parts, token, first, pair, inside, cos, sin, dtype, scale: Any = 1.0):
    """The pairs (2i, 2i + 1) of the columns from `first` on, rotated."""
    even, odd = (total(parts, token, first + 2 * pair + i, inside, dtype, scale) for i in range(2))
    c, s = (plgpu.load(ref.at[token, pair], mask=inside, other=0.0) for ref in (cos, sin))
    return even * c - odd * s, odd * c + even * s


def _store(ref, before, column, value, mask):
    # interpret mode also writes where the mask is off: out of bounds then
    column = jnp.where(mask, column, ref.shape[-1])
    plgpu.store(ref.at[(*before, column)], value.astype(ref.dtype), mask=mask)
