"""Tree attention in Pallas Mosaic GPU, for Hopper: the programs of triton.py with a role for each warpgroup.

Accumulators of 64 rows x 512 values are half the registers of a multiprocessor, so two warpgroups sum the values, 256
columns each, and a third computes the scores and weights for both: while they add the values of one block, it is at
the scores of the next. docs/kernels.md has a picture.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.mosaic import load
from pallas_kernels.tiles import LOG2_E, LOWEST_PEAK, UNSEEN
from pallas_kernels.tree_attention import triton
from pallas_kernels.tree_attention.schedule import WORD_BITS, Plan

ROWS = BLOCK = 64
SCORES, LEFT, RIGHT = range(3)  # the warpgroups
REGISTERS = {SCORES: 184, LEFT: 160, RIGHT: 160}
# Parts of a cache row: the columns of LEFT, those of RIGHT, the rotary part. What fits into shared memory: three, two
# and three blocks of them, and the queries of the second part; the scores keep the other queries in registers.
STAGES = (3, 2, 3)
QUERY_IN_REGISTERS = (True, False, True)


def partial(
    q_latent: Float[Array, "slots q heads rank"],
    q_rope: Float[Array, "slots q heads rope"],
    cache_rows: Float[Array, "slots rows width"],
    lengths: Int32[Array, "slots"],
    plan: Plan,
    *,
    scale: float,
) -> tuple[Float[Array, "slots q heads rank"], Float32[Array, "slots q heads"]]:
    """Attention and its log-sum-exp (natural logarithm, -inf where a token sees nothing)."""
    slots, q, heads, rank = q_latent.shape
    rope, programs, rows = q_rope.shape[3], plan.table.shape[0], plan.words.shape[2]
    widths, dtype = (rank // 2, rank // 2, rope), cache_rows.dtype
    queries = [
        jnp.pad(x.reshape(slots, q * heads, -1), ((0, 0), (0, rows - q * heads), (0, 0))) for x in (q_latent, q_rope)
    ]
    kernel = plgpu.kernel(
        functools.partial(_attend, q=q, scale=scale * LOG2_E),
        out_type=(
            jax.ShapeDtypeStruct((programs, rows, rank), jnp.float32),
            jax.ShapeDtypeStruct((programs, 2, rows), jnp.float32),
        ),
        grid=(programs, rows // ROWS),
        grid_names=("program", "tile"),
        num_threads=len(REGISTERS),
        thread_name="role",
        scratch_types=dict(
            rings=[_operand(stages, BLOCK, width, dtype=dtype) for stages, width in zip(STAGES, widths, strict=True)],
            queries=[
                None if held else _operand(ROWS, width, dtype=dtype)
                for held, width in zip(QUERY_IN_REGISTERS, widths, strict=True)
            ],
            weights=_operand(ROWS, BLOCK, dtype=dtype),
            keep=plgpu.SMEM((ROWS,), jnp.float32),
            arrived=[plgpu.Barrier(num_barriers=stages) for stages in STAGES],
            asked=plgpu.Barrier(num_arrivals=QUERY_IN_REGISTERS.count(False)),
            weighed=plgpu.Barrier(),
            summed=plgpu.Barrier(num_arrivals=2),
        ),
        # lane semantics are what was measured; JAX 0.11 has others by default
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="tree_attention",
    )
    acc, stats = kernel(plan.table, lengths, plan.words, *queries, cache_rows)
    return triton.joined(acc, stats, plan, q_latent, interpret=False)


def _operand(*shape: int, dtype: jnp.dtype) -> Any:
    """Shared memory in the layout that the copy engine writes and the tensor cores read."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def _attend(
    table,
    lengths,
    words,
    q_latent,
    q_rope,
    cache,
    acc_ref,
    stats_ref,
    *,
    rings,
    queries,
    weights,
    keep,
    arrived,
    asked,
    weighed,
    summed,
    q,
    scale,
):
    """One row tile over one chunk of cache blocks: unnormalised sum of values, peak and total in units of log2."""
    program, role = lax.axis_index("program"), lax.axis_index("role")
    rows = pl.ds(lax.axis_index("tile") * ROWS, ROWS)
    slot, first, end = table[program, 0], table[program, 1], table[program, 2]
    half, rank, cache_rows = rings[0].shape[2], q_latent.shape[2], cache.shape[1]
    columns = (pl.ds(0, half), pl.ds(half, half), pl.ds(rank, rings[2].shape[2]))

    def stage(part, i):
        return lax.rem(i - first, jnp.int32(STAGES[part]))

    def fetch(part, i):
        source = cache.at[slot, pl.ds(i * BLOCK, BLOCK), columns[part]]
        plgpu.copy_gmem_to_smem(source, rings[part].at[stage(part, i)], arrived[part].at[stage(part, i)])

    def on_role(which, body):
        pl.when((role == which) & (end > first))(body)

    @functools.partial(on_role, SCORES)
    def _():
        plgpu.set_max_registers(REGISTERS[SCORES], action="increase")
        query = [q_latent.at[slot, rows, columns[0]], q_latent.at[slot, rows, columns[1]], q_rope.at[slot, rows]]
        for part, ref in enumerate(queries):
            if ref is None:
                query[part] = load(query[part], plgpu.Layout.WGMMA)
            else:
                plgpu.copy_gmem_to_smem(query[part], ref, asked)
                query[part] = ref
        plgpu.barrier_wait(asked)
        length = lengths[slot]

        def seen(i):
            shape = (ROWS, BLOCK)
            node = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + (i * BLOCK - length)
            of_rows = [load(words.at[slot, w, rows], plgpu.Layout.WGMMA.reduce(1)) for w in range(words.shape[1])]
            word, *later = [lax.broadcast_in_dim(of_row, shape, [0]) for of_row in of_rows]
            for w, other in enumerate(later, 1):
                word = jnp.where(node >= w * WORD_BITS, other, word)
            bit = lax.shift_right_logical(word, node & (WORD_BITS - 1)) & 1
            visible = (node < 0) | ((node < q) & (bit != 0))
            return visible & (node < cache_rows - length) if cache_rows % BLOCK else visible

        def step(i, carry, masked):
            peak, total = carry

            def product(acc):
                for part in (0, 2, 1):  # what arrives first comes first
                    keys = rings[part].at[stage(part, i)]
                    plgpu.barrier_wait(arrived[part].at[stage(part, i)])
                    plgpu.wgmma(acc, query[part], keys.transpose((1, 0)))
                return acc[...]

            scores = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, BLOCK), jnp.float32)) * scale
            if masked:
                scores = jnp.where(seen(i), scores, UNSEEN)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
            kept = jnp.exp2(peak - new_peak)
            weight = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
            total = total * kept + jnp.sum(weight, axis=1)

            @pl.when(i > first)
            def _():
                plgpu.barrier_wait(summed)

            weights[...] = weight.astype(weights.dtype)
            keep[...] = kept
            plgpu.commit_smem()
            plgpu.barrier_arrive(weighed)
            return new_peak, total

        carry = _full((ROWS,), LOWEST_PEAK), _full((ROWS,), 0)
        unmasked = jnp.clip(lax.div(jnp.clip(length, 0, cache_rows), jnp.int32(BLOCK)), first, end)
        carry = lax.fori_loop(first, unmasked, functools.partial(step, masked=False), carry)
        peak, total = lax.fori_loop(unmasked, end, functools.partial(step, masked=True), carry)
        plgpu.barrier_wait(summed)
        stats_ref[program, 0, rows] = peak
        stats_ref[program, 1, rows] = total

    def sum_values(part, fetched):
        plgpu.set_max_registers(REGISTERS[LEFT], action="decrease")
        for each in fetched:
            pl.loop(first, jnp.minimum(first + STAGES[each], end))(functools.partial(fetch, each))

        def step(i, acc):
            plgpu.barrier_wait(arrived[part].at[stage(part, i)])
            plgpu.barrier_wait(weighed)
            acc = acc * lax.broadcast_in_dim(load(keep, plgpu.Layout.WGMMA.reduce(1)), acc.shape, [0])

            def product(acc):
                plgpu.wgmma(acc, weights, rings[part].at[stage(part, i)])

            acc = pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(acc))
            plgpu.barrier_arrive(summed)
            for each in fetched:
                pl.when(i + STAGES[each] < end)(functools.partial(fetch, each, i + STAGES[each]))
            return acc

        acc = lax.fori_loop(first, end, step, _full((ROWS, half), 0))
        acc_ref[program, rows, columns[part]] = acc

    on_role(LEFT, functools.partial(sum_values, 0, (0, 2)))
    on_role(RIGHT, functools.partial(sum_values, 1, (1,)))


def _full(shape, value):
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
