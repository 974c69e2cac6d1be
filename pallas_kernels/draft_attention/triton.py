"""The context in Pallas Triton: programs over parts of the rows, joined by their log-sum-exp.

A loop in XLA would ask the host before every step whether to go on, and take the whole forward out of its command
buffer. Here the loop is inside the kernel.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.draft_attention.softmax import State
from pallas_kernels.tiles import LOG2_E, LOWEST_PEAK, UNSEEN, dot, exp2, load, tile

BLOCK = 64  # divides KEYS, so that no block reaches beyond the cache
PROGRAMS = 264
LEAST_BLOCKS = 2
"""Of a program, as long as that leaves more than one program: fewer would spend their time on partial results."""


def over_context(
    grouped: Float[Array, "slots block kv_heads group head_dim"],
    context_k: Float[Array, "slots rows kv_heads head_dim"],
    context_v: Float[Array, "slots rows kv_heads head_dim"],
    start: Int32[Array, "slots"],
    window: int | None,
    *,
    interpret: bool,
) -> State:
    slots, block, kv_heads, group, head_dim = grouped.shape
    rows, width = block * group, tile(head_dim)
    reach = context_k.shape[1] if window is None else min(context_k.shape[1], window)
    parts = max(1, min(PROGRAMS // (slots * kv_heads), pl.cdiv(reach, BLOCK * LEAST_BLOCKS)))
    query = jnp.moveaxis(grouped, 1, 3).reshape(slots, kv_heads, rows, head_dim)
    shape = (parts, slots, kv_heads, rows)
    acc, peaks, totals = pl.pallas_call(
        functools.partial(_attend, block=block, window=window, scale=head_dim**-0.5 * LOG2_E, interpret=interpret),
        grid=(parts, kv_heads, slots),
        out_shape=(
            jax.ShapeDtypeStruct((*shape, width), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="draft_attention",
    )(start, query, context_k, context_v)
    peak = jnp.max(peaks, axis=0)
    weight = jnp.exp2(peaks - peak[None])
    total, out = jnp.sum(totals * weight, axis=0), jnp.sum(acc * weight[..., None], axis=0)
    by_position = (slots, kv_heads, group, block)
    return State(
        (peak / LOG2_E).reshape(by_position),
        total.reshape(by_position),
        out[..., :head_dim].reshape(*by_position, head_dim),
    )


def _attend(start, query, keys, values, acc_ref, peak_ref, total_ref, *, block, window, scale, interpret):
    """All positions of a block and the heads of one key head, over one part of the rows they see."""
    part, head, slot = (pl.program_id(axis) for axis in range(3))
    parts, _, _, rows, width = acc_ref.shape
    head_dim = query.shape[3]
    padded = tile(rows)
    length = jnp.minimum(start[slot], keys.shape[1])
    nearest = jnp.int32(0) if window is None else jnp.maximum(start[slot] - window + 1, 0) // BLOCK
    end = (length + BLOCK - 1) // BLOCK
    share = (jnp.maximum(end - nearest, 0) + parts - 1) // parts
    first = jnp.minimum(nearest + part * share, end)
    row = jnp.arange(padded, dtype=jnp.int32)
    held = jnp.minimum(row, rows - 1)
    position = start[slot] + held % block
    q = load(query, (slot, head), held, (), 0, head_dim)

    def step(i, carry):
        acc, peak, total = carry
        j = i * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        k = load(keys, (slot,), j, (head,), 0, head_dim).astype(q.dtype)
        v = load(values, (slot,), j, (head,), 0, head_dim).astype(q.dtype)
        seen = jnp.broadcast_to((j < length)[None, :], (padded, BLOCK))
        if window is not None:
            seen &= position[:, None] - j[None, :] < window
        scores = jnp.where(seen, dot(q, k.T) * scale, UNSEEN)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        keep = exp2(peak - new_peak, interpret)
        weight = exp2(scores - new_peak[:, None], interpret)
        total = total * keep + jnp.sum(weight, axis=1)
        return acc * keep[:, None] + dot(weight.astype(v.dtype), v), new_peak, total

    carry = (
        jnp.zeros((padded, width), jnp.float32),
        jnp.full((padded,), LOWEST_PEAK, jnp.float32),
        jnp.zeros((padded,), jnp.float32),
    )
    acc, peak, total = lax.fori_loop(first, jnp.minimum(first + share, end), step, carry)
    column = jnp.arange(width, dtype=jnp.int32)
    inside = row < rows
    wide = jnp.broadcast_to(inside[:, None], (padded, width))
    plgpu.store(acc_ref.at[part, slot, head, row[:, None], column[None, :]], acc, mask=wide)
    plgpu.store(peak_ref.at[part, slot, head, row], peak, mask=inside)
    plgpu.store(total_ref.at[part, slot, head, row], total, mask=inside)
