"""The routed experts in Pallas Mosaic GPU, for Hopper: a weight is unpacked once for up to 128 tokens of its expert.

The copy engine streams weights and activations into shared memory; each warpgroup unpacks its 64 rows of weights into
registers in the layout in which the tensor cores take a left operand, so that weights never go back to memory. The
copy engine cannot gather: rows of tokens are sorted by expert first, and the sum over the experts of a token gathers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array, BFloat16, Float, Int16, Int32

from pallas_kernels.int4_experts import triton
from pallas_kernels.int4_experts.align import align
from pallas_kernels.int4_experts.config import Ring, Rings
from pallas_kernels.int4_experts.layout import BLOCK_COLUMNS, BLOCK_ROWS, PAIRS, PLANE_COLUMNS, PLANES, TiledExperts
from pallas_kernels.int4_experts.sort import gather, weighted_sum
from pallas_kernels.mosaic import load

OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
FACTOR = 1 / triton.UNIT / triton.TO_SCALE  # what sums of products with `_unpack` are to be multiplied with


def int4_experts(
    x: BFloat16[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    experts: TiledExperts,
    config: Rings,
) -> BFloat16[Array, "tokens hidden"]:
    hidden, width, top_k = experts.hidden, x.shape[1], indices.shape[1]
    x = jnp.pad(x, ((0, 0), (0, hidden - width)))
    expert_of_group, places = align(indices.reshape(-1), experts.experts, config.tokens, interpret=False)
    x, position = gather(x, expert_of_group, places, top_k, interpret=False)
    h = product(x, expert_of_group, experts.gate_up_words, experts.gate_up_scales, config.gate_up)
    y = product(h, expert_of_group, experts.down_words, experts.down_scales, config.down)
    return weighted_sum(y, position, indices, weights, experts.experts, interpret=False)[:, :width]


def product(
    x: BFloat16[Array, "places columns"],
    expert_of_group: Int32[Array, "groups"],
    words: Int16[Array, "experts row_blocks column_blocks parts 64 32"],
    scales: Int32[Array, "experts row_blocks column_blocks parts 2 64"],
    ring: Ring,
) -> BFloat16[Array, "places rows"]:
    """Each group's rows of x times its expert's weights; of two parts, SiLU of the first times the second."""
    experts, row_blocks, column_blocks, parts = words.shape[:4]
    groups = expert_of_group.shape[0]
    tokens = x.shape[0] // groups
    ring = _fit(ring, row_blocks, column_blocks)
    columns = ring.blocks * BLOCK_COLUMNS
    per_program = ring.warpgroups * ring.count * ring.steps
    arrays = (ring.warpgroups * ring.stages, ring.count, ring.blocks * parts)
    x_shape = (1, tokens, column_blocks * BLOCK_COLUMNS) if ring.resident else (ring.stages, tokens, columns)
    kernel = plgpu.kernel(
        functools.partial(_product, ring=ring, row_blocks=row_blocks, programs=row_blocks // per_program, parts=parts),
        out_type=jax.ShapeDtypeStruct((x.shape[0], row_blocks * BLOCK_ROWS), jnp.bfloat16),
        grid=(groups * (row_blocks // per_program),),
        grid_names=("program",),
        num_threads=ring.warpgroups,
        thread_name="warpgroup",
        scratch_types=dict(
            words_ring=plgpu.SMEM(
                (*arrays, BLOCK_ROWS, PLANE_COLUMNS),
                jnp.int16,
                transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64)),
            ),
            scales_ring=plgpu.SMEM((*arrays[:2], arrays[2] * PAIRS, BLOCK_ROWS), jnp.int32),
            x_ring=_operand(*x_shape),
            results=_operand(ring.warpgroups * ring.count, tokens, BLOCK_ROWS),
            arrived=plgpu.Barrier(num_arrivals=2 * ring.count, num_barriers=ring.warpgroups * ring.stages),
            x_arrived=plgpu.Barrier(num_barriers=x_shape[0]),
            released=plgpu.Barrier(num_arrivals=ring.warpgroups, num_barriers=ring.stages),
        ),
        # lane semantics: only they let a kernel see which registers hold what
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="int4_experts_" + ("gate_up" if parts == 2 else "down"),
    )
    return kernel(
        expert_of_group,
        x,
        words.reshape(experts * row_blocks, column_blocks * parts, BLOCK_ROWS, PLANE_COLUMNS),
        scales.reshape(experts * row_blocks, column_blocks * parts * PAIRS, BLOCK_ROWS),
    )


def _fit(ring: Ring, row_blocks: int, column_blocks: int) -> Ring:
    """`ring` for a matrix that may be smaller than the one it was tuned for."""
    blocks = int(np.gcd(ring.blocks, column_blocks))
    warpgroups = int(np.gcd(ring.warpgroups, row_blocks))
    count = int(np.gcd(ring.count, row_blocks // warpgroups))
    steps = int(np.gcd(ring.steps, row_blocks // (warpgroups * count)))
    return Ring(warpgroups, count, blocks, ring.stages, steps, ring.resident)


def _operand(*shape: int) -> Any:
    """Shared memory in the layout that the copy engine writes and the tensor cores read."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=OPERAND)


def _product(
    experts_ref,
    x_ref,
    words_ref,
    scales_ref,
    out_ref,
    *,
    words_ring,
    scales_ring,
    x_ring,
    results,
    arrived,
    x_arrived,
    released,
    ring: Ring,
    row_blocks: int,
    programs: int,
    parts: int,
):
    number, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    group, program = lax.div(number, jnp.int32(programs)), lax.rem(number, jnp.int32(programs))
    expert = experts_ref[group]
    tokens = x_ring.shape[1]
    rows = pl.ds(group * tokens, tokens)
    in_stage = ring.blocks * parts
    stages_per_step = words_ref.shape[1] // in_stage
    total = ring.steps * stages_per_step
    # Registers of a product in flight must stay: two products have registers of their own, in each iteration the same.
    unroll = 2 if ring.count * parts == 1 and ring.blocks % 2 == 0 else 1
    in_loop = ring.count * parts * unroll
    in_flight = min(1, in_loop - 1)
    last_part = min(ring.count, in_loop - 1)  # of what refills a stage: weights of each row block, then activations

    def row_block(step, i):
        return ((program * ring.steps + step) * ring.warpgroups + warpgroup) * ring.count + i

    def of_step(t):
        if ring.steps == 1:
            return 0, t
        return lax.div(t, jnp.int32(stages_per_step)), lax.rem(t, jnp.int32(stages_per_step))

    def stage(t):
        return lax.rem(t, jnp.int32(ring.stages))

    def mine(t):
        return warpgroup * ring.stages + stage(t)

    def fetch_weights(t, i):
        step, k = of_step(t)
        row = expert * row_blocks + row_block(step, i)
        for ref, to, per in ((words_ref, words_ring, 1), (scales_ref, scales_ring, PAIRS)):
            source = ref.at[row, pl.ds(k * (in_stage * per), in_stage * per)]
            plgpu.copy_gmem_to_smem(source, to.at[mine(t), i], arrived.at[mine(t)])

    def fetch_x(t):
        _, k = of_step(t)
        width = x_ring.shape[2]
        source = x_ref.at[rows, pl.ds(k * width, width)]
        plgpu.copy_gmem_to_smem(source, x_ring.at[stage(t)], x_arrived.at[stage(t)])

    def refill_x(t, following):
        if ring.warpgroups == 1:
            fetch_x(following)
        else:
            plgpu.barrier_arrive(released.at[stage(t - 1)])

            @pl.when(warpgroup == 0)
            def _():
                plgpu.barrier_wait(released.at[stage(t - 1)])
                fetch_x(following)

    def refill(t, part):
        """Once the products of stage t - 1 are done, and one of t, its place goes to the next stage, part by part."""
        following = t + ring.stages - 1

        @pl.when((t >= 1) & (following < total))
        def _():
            if part == 0:
                _warpgroup_barrier()
            if part < ring.count:
                fetch_weights(following, part)
            if part == last_part and not ring.resident:
                refill_x(t, following)

    def step_body(step):
        def multiply(*accumulators):
            def some_blocks(t, k, first):
                for j in range(in_loop):
                    b, (i, part) = first * unroll + j // len(accumulators), divmod(j % len(accumulators), parts)
                    if ring.resident:
                        of_x = x_ring.at[0, :, pl.ds((k * ring.blocks + b) * BLOCK_COLUMNS, BLOCK_COLUMNS)]
                    else:
                        of_x = x_ring.at[stage(t), :, pl.ds(b * BLOCK_COLUMNS, BLOCK_COLUMNS)]
                    block = b * parts + part
                    words = load(words_ring.at[mine(t), i, block], plgpu.Layout.WGMMA)
                    pairs = [
                        load(scales_ring.at[mine(t), i, block * PAIRS + pair], plgpu.Layout.WGMMA.reduce(1))
                        for pair in range(PAIRS)
                    ]
                    plgpu.wgmma(accumulators[j % len(accumulators)], _unpack(words, *pairs), of_x.transpose((1, 0)))
                    plgpu.wgmma_wait(in_flight)
                    # Also to have a branch between products: ptxas runs those of one basic block one by one.
                    if j <= last_part:
                        pl.when(first == 0)(functools.partial(refill, t, j))

            def body(k, _):
                t = step * stages_per_step + k
                plgpu.barrier_wait(arrived.at[mine(t)])
                if not ring.resident:
                    plgpu.barrier_wait(x_arrived.at[stage(t)])
                pl.loop(0, ring.blocks // unroll)(functools.partial(some_blocks, t, k))

            lax.fori_loop(0, stages_per_step, body, None)
            return [accumulator[...] for accumulator in accumulators]

        shape = (BLOCK_ROWS, tokens)
        sums = pl.run_scoped(
            multiply, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in range(ring.count * parts)]
        )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in range(ring.count):
            result = sums[i * parts] * FACTOR
            if parts == 2:
                result = triton._swiglu(result, sums[i * parts + 1] * FACTOR)
            _store_transposed(results.at[warpgroup * ring.count + i], result.astype(jnp.bfloat16))
        plgpu.commit_smem()
        for i in range(ring.count):
            columns = pl.ds(row_block(step, i) * BLOCK_ROWS, BLOCK_ROWS)
            plgpu.copy_smem_to_gmem(results.at[warpgroup * ring.count + i], out_ref.at[rows, columns])

    @pl.when(expert >= 0)
    def _():
        if ring.resident:

            @pl.when(warpgroup == 0)
            def _():
                plgpu.copy_gmem_to_smem(x_ref.at[rows], x_ring.at[0], x_arrived.at[0])

        for i in range(ring.count):
            pl.loop(0, min(ring.stages, total))(functools.partial(fetch_weights, i=i))
        if not ring.resident:

            @pl.when(warpgroup == 0)
            def _():
                pl.loop(0, min(ring.stages, total))(fetch_x)

        else:
            plgpu.barrier_wait(x_arrived.at[0])
        pl.loop(0, ring.steps)(step_body)
        plgpu.wait_smem_to_gmem(0)


def _warpgroup_barrier():
    def barrier(_):
        mgpu.utils.warpgroup_barrier()

    inserted: Any = plgpu.inline_mgpu()(barrier)
    inserted()


def _store_transposed(ref, value):
    """Assignment to a transposed reference is new in JAX 0.11."""
    layout = plgpu.Layout.WGMMA_TRANSPOSED

    def store(_, ref, value):
        value.store_tiled(mgpu.utils.memref_transpose(ref, (1, 0, 3, 2)), swizzle=128)

    stored: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(OPERAND), layout))(store)
    stored(ref, plgpu.layout_cast(value, layout))


def _unpack(words, *pairs):
    """bf16 [64, 128] over FACTOR, as triton._weights."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *[plgpu.Layout.WGMMA.reduce(1)] * PAIRS),
        return_type=plgpu.ShapeDtypeStruct((BLOCK_ROWS, BLOCK_COLUMNS), jnp.bfloat16, plgpu.Layout.WGMMA),
    )
    def unpack(_, words, *pairs):
        i32 = ir.IntegerType.get_signless(32)
        two = ir.VectorType.get((2,), ir.BF16Type.get())

        def asm(code, *args) -> Any:
            constraints = ",".join(["=r"] + ["r"] * len(args))
            return llvm.inline_asm(i32, list(args), code, constraints, has_side_effects=False)

        low = np.vectorize(lambda r: llvm.bitcast(i32, r), otypes=[object])(words.registers)
        high = np.vectorize(lambda r: asm("shr.u32 $0, $1, 8;", r), otypes=[object])(low)
        planes = []
        for plane in range(PLANES):
            half, unit = (low, high)[plane // 2], triton.ODD if plane % 2 else 1
            pick = "mov.b32 {l, h}, c; mov.b32 $0, {%s};" % ("h, h" if plane % 2 else "l, l")
            factors = [
                [
                    asm(
                        f"{{ .reg .b32 c; .reg .b16 l, h; mov.b32 c, {triton._two(value)}; "
                        f"mul.rn.bf16x2 c, $1, c; {pick} }}",
                        pair if pair.type == i32 else llvm.bitcast(i32, pair),
                    )
                    for value in (triton.TO_SCALE / unit, -triton.OFFSET * triton.UNIT * triton.TO_SCALE)
                ]
                for pair in np.asarray(pairs[plane // 2].registers, dtype=object).flat
            ]
            plane_registers = np.empty(half.shape, dtype=object)
            for index in np.ndindex(half.shape):
                factor, offset = factors[index[ROW_AXIS]]
                code = f"{{ .reg .b32 c; and.b32 c, $1, {triton._two_bits(15 * unit)}; fma.rn.bf16x2 $0, c, $2, $3; }}"
                plane_registers[index] = llvm.bitcast(two, asm(code, half[index], factor, offset))
            planes.append(plane_registers)
        registers = np.concatenate(planes, axis=COLUMN_AXIS)
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=None)

    return unpack(words, *pairs)


ROW_AXIS, COLUMN_AXIS = 4, 1  # of the registers of a WGMMA operand: rows r and r + 8, and eights of columns
