"""The k largest logits of a row and its log-sum-exp, with one reading of the vocabulary."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

BLOCK = 256
PART = 32 * BLOCK
"""Logits that one program reads."""
_NOWHERE = 2**30


class TopK(NamedTuple):
    """What `top_k` finds. Positions of values of -inf are arbitrary; a row with a NaN has a log-sum-exp of NaN.

    Attributes:
        values: in falling order.
        ids: their positions, the lowest first among equal values.
        lse: log-sum-exp of the row.
        lp: values - lse, both rounded before.
    """

    values: Float32[Array, "*rows k"]
    ids: Int32[Array, "*rows k"]
    lse: Float32[Array, "*rows"]
    lp: Float32[Array, "*rows k"]


def top_k(logits: Float[Array, "rows vocab"], k: int, *, interpret: bool) -> TopK:
    """The k largest of each row, with one reading of the vocabulary; lists of k come out in k steps."""
    rows, vocab = logits.shape
    parts = pl.cdiv(vocab, PART)
    maxima, peaks, totals = pl.pallas_call(
        _read,
        grid=(parts, rows),
        out_shape=(
            jax.ShapeDtypeStruct((rows, parts * PART // BLOCK), jnp.float32),
            jax.ShapeDtypeStruct((rows, parts), jnp.float32),
            jax.ShapeDtypeStruct((rows, parts), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="read_vocabulary",
    )(logits)
    chosen = pl.pallas_call(
        functools.partial(_choose, k=k),
        grid=(rows,),
        out_shape=(
            jax.ShapeDtypeStruct((rows, k), jnp.float32),
            jax.ShapeDtypeStruct((rows, k), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            jax.ShapeDtypeStruct((rows, k), jnp.float32),
        ),
        # a step is a chain of reductions: within one warp they need no barrier
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="choose_tokens",
    )(logits, maxima, peaks, totals)
    return TopK(*chosen)


def _load(logits, row, position):
    """Float32, -inf beyond the end, and 0.0 for -0.0: equal values are ordered by their position alone."""
    value = plgpu.load(logits.at[row, position], mask=position < logits.shape[1], other=-np.inf).astype(jnp.float32)
    return jnp.where(value == 0, np.float32(0), value)


def _read(logits, maxima, peaks, totals):
    part, row = pl.program_id(0), pl.program_id(1)
    block = part * (PART // BLOCK) + jnp.arange(PART // BLOCK, dtype=jnp.int32)
    values = _load(logits, row, block[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[None, :])
    largest = jnp.max(values, axis=1)
    peak = jnp.max(largest)
    finite = jnp.where(peak == -np.inf, np.float32(0), peak)  # -inf - -inf would be NaN
    plgpu.store(maxima.at[row, block], largest)
    peaks[row, part] = peak
    totals[row, part] = jnp.sum(jnp.sum(jnp.exp(values - finite), axis=1))


def _choose(logits, maxima, peaks, totals, values_ref, ids_ref, lse_ref, lp_ref, *, k):
    """k times the first of what is left: from the lowest block with the largest maximum, which then gets a new one."""
    row, vocab, blocks, parts = pl.program_id(0), logits.shape[1], maxima.shape[1], peaks.shape[1]
    block = jnp.arange(pl.next_power_of_2(blocks), dtype=jnp.int32)
    inner, rank = (jnp.arange(n, dtype=jnp.int32) for n in (BLOCK, max(32, pl.next_power_of_2(k))))

    def step(i, carry):
        largest, last_value, last_position, values, ids = carry
        value = jnp.max(largest)
        chosen = jnp.minimum(jnp.min(jnp.where(largest == value, block, _NOWHERE)), blocks - 1)
        position = chosen * BLOCK + inner
        held = _load(logits, row, position)
        # whatever was taken before comes no later in the order than the last
        left = (held < last_value) | ((held == last_value) & (position > last_position))
        first = jnp.min(jnp.where(left & (held == value), position, _NOWHERE))
        left = left & ((held < value) | ((held == value) & (position > first)))
        largest = jnp.where(block == chosen, jnp.max(jnp.where(left, held, -np.inf)), largest)
        values = jnp.where(rank == i, value, values)
        return largest, value, first, values, jnp.where(rank == i, jnp.minimum(first, vocab - 1), ids)

    carry = (
        plgpu.load(maxima.at[row, block], mask=block < blocks, other=-np.inf),
        jnp.float32(np.inf),
        jnp.int32(-1),
        jnp.zeros(rank.shape, jnp.float32),
        jnp.zeros(rank.shape, jnp.int32),
    )
    *_, values, ids = lax.fori_loop(0, k, step, carry)
    plgpu.store(values_ref.at[row, rank], values, mask=rank < k)
    plgpu.store(ids_ref.at[row, rank], ids, mask=rank < k)

    part = jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32)
    peak = plgpu.load(peaks.at[row, part], mask=part < parts, other=-np.inf)
    total = plgpu.load(totals.at[row, part], mask=part < parts, other=0.0)
    highest = jnp.max(peak)
    finite = jnp.where(highest == -np.inf, np.float32(0), highest)
    lse = finite + jnp.log(jnp.sum(total * jnp.exp(peak - finite)))
    lse_ref[row] = lse
    plgpu.store(lp_ref.at[row, rank], values - lse, mask=rank < k)
