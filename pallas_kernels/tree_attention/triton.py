"""Tree attention in Pallas Triton: programs over parts of the prefix, then a merge by log-sum-exp.

One tile of cache rows serves both products: all its columns as keys, the first `rank` as values. docs/kernels.md has a
picture and the reasons.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.tiles import LOG2_E, LOWEST_PEAK, UNSEEN, dot, exp2, load, tile
from pallas_kernels.tree_attention.schedule import WORD_BITS, Plan

MERGED = 8192
"""Values of partial results that a merge program loads at once."""
MANY_ROWS = 512
"""Merge programs that keep a GPU busy."""


def partial(
    q_latent: Float[Array, "slots q heads rank"],
    q_rope: Float[Array, "slots q heads rope"],
    cache_rows: Float[Array, "slots rows width"],
    lengths: Int32[Array, "slots"],
    plan: Plan,
    *,
    scale: float,
    interpret: bool,
) -> tuple[Float[Array, "slots q heads rank"], Float32[Array, "slots q heads"]]:
    """Attention and its log-sum-exp (natural logarithm, -inf where a token sees nothing)."""
    slots, q, heads, rank = q_latent.shape
    query_rows, programs, config = q * heads, plan.table.shape[0], plan.config
    masks = () if plan.words is None else (plan.words,)
    acc, stats = pl.pallas_call(
        functools.partial(_attend, q=q, heads=heads, config=config, scale=scale * LOG2_E, interpret=interpret),
        grid=(pl.cdiv(query_rows, config.rows), programs),
        out_shape=(
            jax.ShapeDtypeStruct((programs, query_rows, rank), jnp.float32),
            jax.ShapeDtypeStruct((programs, 2, query_rows), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="tree_attention",
    )(
        plan.table,
        lengths,
        q_latent.reshape(slots, query_rows, rank),
        q_rope.reshape(slots, query_rows, -1),
        cache_rows,
        *masks,
    )
    return joined(acc, stats, plan, q_latent, interpret)


def joined(
    acc: Float32[Array, "programs rows rank"],
    stats: Float32[Array, "programs 2 rows"],
    plan: Plan,
    q_latent: Float[Array, "slots q heads rank"],
    interpret: bool,
) -> tuple[Float[Array, "slots q heads rank"], Float32[Array, "slots q heads"]]:
    """The results of all programs merged per slot; `acc` and `stats` may have more rows than there are queries."""
    slots, q, heads, rank = q_latent.shape
    programs, query_rows = acc.shape[0], q * heads
    columns, parts = _merge_tile(query_rows * slots, -(-programs // slots), tile(rank))
    out, lse = pl.pallas_call(
        functools.partial(_merge, columns=columns, parts=parts),
        grid=(query_rows, pl.cdiv(rank, columns), slots),
        out_shape=(
            jax.ShapeDtypeStruct((slots, query_rows, rank), q_latent.dtype),
            jax.ShapeDtypeStruct((slots, query_rows), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="tree_attention_merge",
    )(plan.segments, acc, stats)
    return out.reshape(q_latent.shape), lse.reshape(slots, q, heads)


def _attend(table, lengths, q_latent, q_rope, cache, *refs, q, heads, config, scale, interpret):
    """One row tile over one chunk of cache blocks: unnormalised sum of values, peak and total in units of log2."""
    *masks, acc_ref, stats_ref = refs
    query_rows, rank = q_latent.shape[1:]
    cache_rows, rope = cache.shape[1], q_rope.shape[2]
    block, row_count = config.block, config.rows
    row_tile, program = pl.program_id(0), pl.program_id(1)
    slot, first, end = table[program, 0], table[program, 1], table[program, 2]

    @pl.when(end > first)
    def _():
        length = lengths[slot]
        row = row_tile * row_count + jnp.arange(row_count, dtype=jnp.int32)
        loaded = jnp.minimum(row, query_rows - 1)
        token = loaded // heads
        ql = load(q_latent, (slot,), loaded, (), 0, rank)
        qr = load(q_rope, (slot,), loaded, (), 0, rope)
        # before the loop: a load of a word inside it would be pipelined too, through shared memory
        words = [plgpu.load(ref.at[slot, token, w]) for ref in masks for w in range(ref.shape[2])]

        def seen(row_in_cache):
            node = row_in_cache - length
            if words:
                word = words[0][:, None]
                for w in range(1, len(words)):
                    word = jnp.where((node >= w * WORD_BITS)[None, :], words[w][:, None], word)
                bit = (word >> (node & (WORD_BITS - 1))[None, :]) & 1
                visible = (node < 0)[None, :] | ((node < q)[None, :] & (bit != 0))
            else:
                visible = node[None, :] <= token[:, None]
            return visible & (row_in_cache < cache_rows)[None, :] if cache_rows % block else visible

        def step(i, carry, masked):
            acc, peak, total = carry
            j = i * block + jnp.arange(block, dtype=jnp.int32)
            held = jnp.minimum(j, cache_rows - 1) if masked and cache_rows % block else j
            latent = load(cache, (slot,), held, (), 0, rank).astype(ql.dtype)
            key_rope = load(cache, (slot,), held, (), rank, rope).astype(ql.dtype)
            scores = _scores(ql, qr, latent, key_rope, i, end, scale, config.split_scores)
            if masked:
                scores = jnp.where(seen(j), scores, UNSEEN)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
            keep = exp2(peak - new_peak, interpret)
            weight = exp2(scores - new_peak[:, None], interpret)
            total = total * keep + jnp.sum(weight, axis=1)
            acc = acc * keep[:, None] + dot(weight.astype(latent.dtype), latent)
            return acc, new_peak, total

        carry = (
            jnp.zeros((row_count, tile(rank)), jnp.float32),
            jnp.full((row_count,), LOWEST_PEAK, jnp.float32),
            jnp.zeros((row_count,), jnp.float32),
        )
        committed = jnp.clip(length, 0, cache_rows) // block
        unmasked = jnp.clip(committed, first, end)
        carry = lax.fori_loop(first, unmasked, functools.partial(step, masked=False), carry)
        acc, peak, total = lax.fori_loop(unmasked, end, functools.partial(step, masked=True), carry)

        column = jnp.arange(tile(rank), dtype=jnp.int32)
        inside = (row < query_rows)[:, None] & (column < rank)[None, :]
        plgpu.store(acc_ref.at[program, row[:, None], column[None, :]], acc, mask=inside)
        plgpu.store(stats_ref.at[program, 0, row], peak, mask=row < query_rows)
        plgpu.store(stats_ref.at[program, 1, row], total, mask=row < query_rows)


def _merge_tile(rows: int, chunks: int, rank: int) -> tuple[int, int]:
    """Columns of a merge program, and how many of the about `chunks` partial results of a row it loads at once.

    Loads of partial results that are not there cost as much as others. Few rows are cut to keep the GPU busy.
    """
    parts = min(pl.next_power_of_2(chunks), 64)
    return min(rank, MERGED // parts if rows >= MANY_ROWS else 128), parts


def _merge(segments, acc_ref, stats_ref, out_ref, lse_ref, *, columns, parts):
    """One query row and some columns: the partial results of all programs of its slot."""
    row, column_tile, slot = (pl.program_id(axis) for axis in range(3))
    programs, _, rank = acc_ref.shape
    first, end = segments[slot, 0], segments[slot, 1]
    column = column_tile * columns + jnp.arange(columns, dtype=jnp.int32)

    def body(k, carry):
        peak, total, out = carry
        part = first + k * parts + jnp.arange(parts, dtype=jnp.int32)
        held, live = jnp.minimum(part, programs - 1), part < end
        peaks = plgpu.load(stats_ref.at[held, 0, row], mask=live, other=UNSEEN)
        totals = plgpu.load(stats_ref.at[held, 1, row], mask=live, other=0.0)
        inside = live[:, None] & (column < rank)[None, :]
        accs = plgpu.load(acc_ref.at[held[:, None], row, column[None, :]], mask=inside, other=0.0)
        new_peak = jnp.maximum(peak, jnp.max(peaks))
        weight, keep = jnp.exp2(peaks - new_peak), jnp.exp2(peak - new_peak)
        return new_peak, total * keep + jnp.sum(weight * totals), out * keep + jnp.sum(accs * weight[:, None], axis=0)

    carry = jnp.float32(LOWEST_PEAK), jnp.float32(0), jnp.zeros((columns,), jnp.float32)
    peak, total, out = lax.fori_loop(0, (end - first + parts - 1) // parts, body, carry)
    safe = jnp.where(total > 0, total, 1.0)
    plgpu.store(out_ref.at[slot, row, column], (out / safe).astype(out_ref.dtype), mask=column < rank)

    @pl.when(column_tile == 0)
    def _():
        lse_ref[slot, row] = jnp.where(total > 0, (peak + jnp.log2(safe)) / LOG2_E, -jnp.inf)


def _scores(ql, qr, latent, key_rope, i, end, scale, split):
    """Scaled scores in log2 units.

    Triton gives the first of two chained dots one warp per 16 rows, so that with 64 rows and 8 warps every score is
    computed twice. `split` passes the scores through a branch on the loop counter that the compiler cannot decide,
    which hides the chain: each warp then computes its own columns.
    """
    if not split:
        return (dot(ql, latent.T) + dot(qr, key_rope.T)) * scale
    by_latent, by_rope = dot(ql, latent.T), dot(qr, key_rope.T)
    return lax.cond(
        i < end, lambda: by_latent * scale + by_rope * scale, lambda: by_latent * (2 * scale) + by_rope * (2 * scale)
    )
