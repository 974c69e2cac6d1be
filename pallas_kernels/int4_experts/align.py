"""Sorting the assignments of tokens to experts by expert, on the device, in one kernel and without atomics."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int32

CHUNK = 1024

Aligned = tuple[Int32[Array, "experts"], Int32[Array, "experts"], Int32[Array, "assignments"]]


def align(experts_of: Int32[Array, "assignments"], experts: int, *, interpret: bool) -> Aligned:
    """How many assignments each expert has, where they start, and the assignments in that order.

    Those of indices outside [0, experts) come nowhere: the end of the order stays unwritten for them.
    """
    n = experts_of.shape[0]
    shapes = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (experts, experts, n)]
    kernel = pl.pallas_call(
        functools.partial(_kernel, n=n, chunk=min(CHUNK, max(16, pl.next_power_of_2(n)))),
        grid=(experts,),
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="int4_experts_align",
    )
    counts, starts, order = kernel(experts_of)
    return counts, starts, order


def _kernel(experts_ref, counts_ref, starts_ref, order_ref, *, n: int, chunk: int):
    expert = pl.program_id(0)
    lane = jnp.arange(chunk, dtype=jnp.int32)
    chunks = pl.cdiv(n, chunk)

    def load(i):
        index = i * chunk + lane
        return index, plgpu.load(experts_ref.at[index], mask=index < n, other=-1)

    def count(i, carry):
        before, here = carry
        _, e = load(i)
        before += jnp.sum(((e >= 0) & (e < expert)).astype(jnp.int32))
        return before, here + jnp.sum((e == expert).astype(jnp.int32))

    zero = jnp.int32(0)
    start, total = lax.fori_loop(0, chunks, count, (zero, zero))
    counts_ref[expert] = total
    starts_ref[expert] = start

    def write(i, position):
        index, e = load(i)
        mine = (e == expert).astype(jnp.int32)
        # interpret mode also writes where the mask is off: out of bounds then
        place = jnp.where(e == expert, position + jnp.cumsum(mine) - 1, n)
        plgpu.store(order_ref.at[place], index, mask=e == expert)
        return position + jnp.sum(mine)

    @pl.when(total > 0)
    def _():
        lax.fori_loop(0, chunks, write, start)
