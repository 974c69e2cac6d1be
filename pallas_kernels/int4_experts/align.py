"""Groups of assignments with one expert each, made on the device, in one kernel and without atomics."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int32

CHUNK = 1024

Groups = tuple[Int32[Array, "groups"], Int32[Array, "places"]]


def align(experts_of: Int32[Array, "assignments"], experts: int, group: int, *, interpret: bool) -> Groups:
    """The expert of each group (-1: an empty group), and its assignments: `group` of them, -1 after the last.

    The first group of expert e is number e + s // group, where s assignments have smaller experts: so no expert has to
    know how many groups the others have, at the cost of at most one empty group each. The places of empty groups stay
    unwritten. Assignments with an index outside [0, experts) are in no group.
    """
    n = experts_of.shape[0]
    groups = experts + n // group
    kernel = pl.pallas_call(
        functools.partial(_kernel, n=n, group=group, chunk=min(CHUNK, max(16, pl.next_power_of_2(n)))),
        grid=(experts,),
        out_shape=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in (groups, groups * group)],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="int4_experts_align",
    )
    expert_of_group, places = kernel(experts_of)
    return expert_of_group, places


def _kernel(experts_ref, expert_of_group_ref, places_ref, *, n: int, group: int, chunk: int):
    expert, last = pl.program_id(0), pl.num_programs(0) - 1
    lane = jnp.arange(chunk, dtype=jnp.int32)
    chunks = pl.cdiv(n, chunk)

    def store(ref, place, value, mask):
        # interpret mode also writes where the mask is off: out of bounds then
        place = jnp.where(mask, place, ref.shape[0])
        plgpu.store(ref.at[place], jnp.broadcast_to(jnp.int32(value), place.shape), mask=mask)

    def load(i):
        index = i * chunk + lane
        return index, plgpu.load(experts_ref.at[index], mask=index < n, other=-1)

    def count(i, carry):
        before, here = carry
        _, e = load(i)
        before += jnp.sum(((e >= 0) & (e < expert)).astype(jnp.int32))
        return before, here + jnp.sum((e == expert).astype(jnp.int32))

    zero = jnp.int32(0)
    before, total = lax.fori_loop(0, chunks, count, (zero, zero))
    first = expert + before // group
    used = (total + (group - 1)) // group

    def write(i, done):
        index, e = load(i)
        mine = e == expert
        position = done + jnp.cumsum(mine.astype(jnp.int32)) - 1
        store(places_ref, first * group + position, index, mine)
        store(expert_of_group_ref, first + position // group, expert, mine & (position % group == 0))
        return done + jnp.sum(mine.astype(jnp.int32))

    @pl.when(total > 0)
    def _():
        lax.fori_loop(0, chunks, write, zero)
        rest = total + jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32)
        store(places_ref, first * group + rest, -1, rest < used * group)

    following = jnp.where(expert == last, expert_of_group_ref.shape[0], expert + 1 + (before + total) // group)
    empty = following - (first + used)

    def clear(i, _):
        index = i * chunk + lane
        store(expert_of_group_ref, first + used + index, -1, index < empty)

    lax.fori_loop(0, (empty + (chunk - 1)) // chunk, clear, None)
