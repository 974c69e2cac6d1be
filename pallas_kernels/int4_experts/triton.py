"""The routed experts as two or three kernels: gate and up with SiLU, down with the routing weight, and the grouping.

Weights are the left operand of a transposed product, [weight rows, columns] x [columns, tokens], so that a tile of 8
tokens wastes little. They go from memory to the tensor cores by shifts and masks only: see `layout` for the nibbles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int16, Int32

from pallas_kernels.int4_experts.align import align
from pallas_kernels.int4_experts.config import Config, Tile
from pallas_kernels.int4_experts.layout import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    PAIRS,
    PLANE_COLUMNS,
    PLANES,
    TiledExperts,
    TiledMatrix,
    padded,
)

OFFSET = 8  # of codes above the weights that they stand for
UNIT = 2.0**-133  # of bf16: what its lowest bit is worth where the exponent is 0 or 1
ODD = 16  # UNITs that the lowest bit of a code is worth in an odd plane, where it is not the lowest of the bf16
TO_NUMBER = 2.0**127  # what codes are multiplied with to be out of the range of subnormal numbers
TO_SCALE = 2.0**100  # the same where a scale comes on top
NARROW = 512  # inner width up to which the activations of a down program stay in registers


class Blocks(NamedTuple):
    """How many blocks of an expert's weights there are in each direction."""

    rows: int
    columns: int
    parts: int


class Place(NamedTuple):
    """Where the weight rows of one accumulator are."""

    row_block: Any
    first: Any
    part: int


def int4_experts(
    x: BFloat16[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    experts: TiledExperts,
    config: Config,
    *,
    interpret: bool,
) -> BFloat16[Array, "tokens hidden"]:
    h, groups = gate_up(x, indices, experts, config, interpret=interpret)
    return down(h, groups, indices, weights, experts, config, width=x.shape[1], interpret=interpret)


def gate_up(
    x: BFloat16[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    experts: TiledExperts,
    config: Config,
    *,
    interpret: bool,
) -> tuple[Float[Array, "rows inner"], tuple[Array, ...]]:
    """The first half of the layer: a row per assignment (partial sums if `splits` > 1), and the groups, if made."""
    hidden, inner = experts.hidden, experts.inner
    flat = indices.reshape(-1)
    x = jnp.pad(x, ((0, 0), (0, hidden - x.shape[1])))
    tile = _fit(config.gate_up, inner, hidden)
    sort = config.grouping == "align"
    aligned = align(flat, experts.experts, tile.tokens, interpret=interpret) if sort else ()
    lookup, tables = _lookup_of(config, flat.size, experts.experts), aligned or (flat,)
    publishes = config.grouping == "scan" and config.down_form == "group"
    programs = tables[0].shape[0]
    groups = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (programs, programs * tile.tokens)]
    h, *published = _call(
        _gate_up_kernel,
        (inner // (tile.rows * tile.count), programs, tile.splits),
        [_partial_shape(tile, 2, flat.size, inner), *(groups if publishes else [])],
        tile,
        (x, *_flat(experts.gate_up_words, experts.gate_up_scales), *tables),
        blocks=_blocks_of(experts.gate_up_words),
        lookup=functools.partial(lookup, group=tile.tokens),
        top_k=indices.shape[1],
        publishes=publishes,
        interpret=interpret,
    )
    return h, aligned or tuple(published)


def activations(
    h: Float[Array, "rows inner"], assignments: int, experts: TiledExperts, config: Config
) -> BFloat16[Array, "assignments inner"]:
    """`h` of `gate_up`; of partial sums, their SwiGLU."""
    splits = _fit(config.gate_up, experts.inner, experts.hidden).splits
    if splits == 1:
        return h
    gate, up = jnp.sum(h.reshape(splits, 2, assignments, experts.inner), axis=0)
    return _swiglu(gate, up).astype(jnp.bfloat16)


def down(
    h: Float[Array, "rows inner"],
    groups: tuple[Array, ...],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    experts: TiledExperts,
    config: Config,
    *,
    width: int,
    interpret: bool,
) -> BFloat16[Array, "tokens width"]:
    """The second half of the layer, from what `gate_up` returned."""
    tokens, top_k = indices.shape
    hidden, inner = experts.hidden, experts.inner
    flat, flat_weights = indices.reshape(-1), weights.reshape(-1).astype(jnp.float32)
    run = functools.partial(_call, interpret=interpret)
    narrow, splits = inner <= NARROW, _fit(config.gate_up, inner, hidden).splits
    tile = _fit(config.down, hidden, inner)
    matrix = _flat(experts.down_words, experts.down_scales)
    row_blocks = hidden // (tile.rows * tile.count)
    if config.down_form == "token":
        if not narrow:
            raise NotImplementedError(f"int4_experts: down_form='token' takes inner <= {NARROW}, not {experts.inner}")
        y = run(
            _down_token_kernel,
            (row_blocks, tokens),
            jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16),
            tile,
            (h, *matrix, flat, flat_weights),
            blocks=_blocks_of(experts.down_words),
            experts=experts.experts,
            top_k=top_k,
            splits=splits,
        )
        return y[:, :width]

    if not narrow:
        h = activations(h, flat.size, experts, config)
    steps = tile.steps if narrow else 1
    summed: dict[str, Any] = {"splits": splits} if narrow else {}
    lookup = _lookup_aligned if groups else _lookup_of(config, flat.size, experts.experts)
    tables = groups or (flat,)
    rows = run(
        _down_group_narrow_kernel if narrow else _down_group_kernel,
        (row_blocks // steps, tables[0].shape[0]),
        jax.ShapeDtypeStruct((flat.size, hidden), jnp.bfloat16),
        tile,
        (h, *matrix, flat_weights, *tables),
        blocks=_blocks_of(experts.down_words),
        lookup=functools.partial(lookup, group=config.gate_up.tokens),
        **summed,
    )
    rows = rows[:, :width].reshape(tokens, top_k, width).astype(jnp.float32)
    ours = (indices >= 0) & (indices < experts.experts)  # nobody wrote the rows of the others
    return jnp.sum(jnp.where(ours[:, :, None], rows, 0.0), axis=1).astype(jnp.bfloat16)


def int4_matmul(
    x: BFloat16[Array, "tokens columns"], matrix: TiledMatrix, tile: Tile, *, interpret: bool
) -> BFloat16[Array, "tokens rows"]:
    tokens = x.shape[0]
    rows, columns = padded(matrix.rows), padded(matrix.columns)
    x = jnp.pad(x, ((0, 0), (0, columns - matrix.columns)))
    tile = _fit(tile, rows, columns)
    y = _call(
        _matmul_kernel,
        (rows // (tile.rows * tile.count), pl.cdiv(tokens, tile.tokens), tile.splits),
        _partial_shape(tile, 1, tokens, rows),
        tile,
        (x, *_flat(matrix.words, matrix.scales)),
        blocks=_blocks_of(matrix.words),
        interpret=interpret,
    )
    if tile.splits > 1:
        y = jnp.sum(y.reshape(tile.splits, tokens, rows), axis=0).astype(jnp.bfloat16)
    return y[:, : matrix.rows]


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    out_shape: Any,
    tile: Tile,
    arrays: Sequence[Array],
    *,
    interpret: bool,
    **static: Any,
) -> Any:
    return pl.pallas_call(
        functools.partial(kernel, tile=tile, emulate=interpret, **static),
        grid=grid,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="int4_experts" + kernel.__name__.removesuffix("_kernel"),
    )(*arrays)


def _fit(tile: Tile, rows: int, columns: int) -> Tile:
    """`tile` for a matrix that may be smaller than the one it was tuned for."""
    count = tile.count if rows % (tile.rows * tile.count) == 0 else 1
    steps = tile.steps if (rows // (tile.rows * count)) % tile.steps == 0 else 1
    splits = min(tile.splits, columns // BLOCK_COLUMNS)
    return Tile(tile.rows, tile.tokens, tile.warps, tile.stages, count, splits, steps, tile.scale_on)


def _partial_shape(tile: Tile, parts: int, rows: int, width: int) -> jax.ShapeDtypeStruct:
    """Partial sums stand below each other: row (split * parts + part) * rows + row."""
    if tile.splits > 1:
        return jax.ShapeDtypeStruct((tile.splits * parts * rows, width), jnp.float32)
    return jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)


def _blocks_of(words: Array) -> Blocks:
    return Blocks(*words.shape[1:4])


def _flat(words: Array, scales: Array) -> tuple[Array, Array]:
    """Blocks, and pairs of scales, of all experts one after the other."""
    return words.reshape(-1, *words.shape[-2:]), scales.reshape(-1, scales.shape[-1])


# --- which assignments a program computes ---


def _lookup_of(config: Config, n: int, experts: int) -> Callable[..., Any]:
    """A function (refs, program) -> (expert, runs, rows, valid)."""
    if config.grouping == "align":
        return _lookup_aligned
    lookup = _lookup_row if config.grouping == "row" else functools.partial(_lookup_scan, n=n)
    return functools.partial(lookup, experts=experts)


def _lookup_row(refs, program, *, group: int, experts: int):
    (experts_ref,) = refs
    expert = experts_ref[program]
    lane = jnp.arange(group, dtype=jnp.int32)
    return expert, (expert >= 0) & (expert < experts), jnp.where(lane == 0, program, 0), lane == 0


def _lookup_scan(refs, program, *, group: int, experts: int, n: int):
    """The assignments from `program` on that have its expert, if `group` divides the number of those before."""
    (experts_ref,) = refs
    index = jnp.arange(max(16, pl.next_power_of_2(n)), dtype=jnp.int32)
    all_experts = plgpu.load(experts_ref.at[index], mask=index < n, other=-1)
    expert = experts_ref[program]
    same = all_experts == expert
    before = jnp.sum((same & (index < program)).astype(jnp.int32))
    mine = (same & (index >= program)).astype(jnp.int32)
    rank = jnp.cumsum(mine) * mine  # from 1
    lane = jnp.arange(group, dtype=jnp.int32)
    rows = jnp.sum(jnp.where(rank[None, :] == lane[:, None] + 1, index[None, :] + 1, 0), axis=1) - 1
    runs = (before % group == 0) & (expert >= 0) & (expert < experts)
    return expert, runs, jnp.maximum(rows, 0), rows >= 0


def _lookup_aligned(refs, program, *, group: int):
    expert_of_group_ref, places_ref = refs
    expert = expert_of_group_ref[program]
    rows = plgpu.load(places_ref.at[program * group + jnp.arange(group, dtype=jnp.int32)])
    return jnp.maximum(expert, 0), expert >= 0, jnp.maximum(rows, 0), rows >= 0


# --- the product ---


def _halves(words: Int16[Array, "rows 32"], emulate: bool) -> tuple[Array, Array]:
    """The words, and the words shifted by two planes: each two planes in its lowest 8 bits."""
    return words, words >> jnp.int16(8) if emulate else _of_pairs("shr.u32 $0, $1, 8;", [words], jnp.int16)


def _weights(
    halves: tuple[Array, Array], plane: int, scale: Float32[Array, "rows"] | None, emulate: bool
) -> BFloat16[Array, "rows 32"]:
    """Plane `plane` as weights over `_factor`, with their scales if those are given.

    The lowest 8 bits of a bf16 whose others are 0 are worth as many UNITs, also where the eighth, the lowest of the
    exponent, makes it a normal number: a plane need only be masked to be a number. One multiply-add per pair takes
    off the offset and, as it rounds once, gives the product of weight and scale as exactly as bf16 can.
    """
    half, unit = halves[plane // 2], ODD if plane % 2 else 1
    if scale is not None:
        scale = jnp.broadcast_to(scale.astype(jnp.bfloat16)[:, None], half.shape)
    if emulate:
        weight = ((half >> jnp.int16(4 * (plane % 2))) & jnp.int16(15)).astype(jnp.bfloat16) - OFFSET
        return weight if scale is None else weight * scale
    to = TO_NUMBER if scale is None else TO_SCALE
    code = (
        f"{{ .reg .b32 f, o; mov.b32 f, {_two(to / unit)}; mov.b32 o, {_two(-OFFSET * UNIT * to)}; "
        f"and.b32 $0, $1, {_two_bits(15 * unit)}; "
    )
    if scale is not None:
        code += "mul.rn.bf16x2 f, f, $2; mul.rn.bf16x2 o, o, $2; "
    code += "fma.rn.bf16x2 $0, $0, f, o; }"
    return _of_pairs(code, [half] if scale is None else [half, scale], jnp.bfloat16)


def _factor(tile: Tile, emulate: bool) -> float:
    """What weights, and so the sums of products, are to be multiplied with."""
    if emulate:
        return 1.0
    return 1 / UNIT / (TO_NUMBER if tile.scale_on == "sum" else TO_SCALE)


def _two(value: float) -> str:
    """A number that is a bf16, twice in a register."""
    return _two_bits(int(np.float32(value).view(np.uint32)) >> 16)


def _two_bits(bits: int) -> str:
    return f"0x{bits:04X}{bits:04X}"


def _of_pairs(code: str, args: Sequence[Array], dtype: Any) -> Array:
    """`code` for two neighbouring elements of 16 bits at a time, which share a register."""
    (out,) = plgpu.elementwise_inline_asm(
        code,
        args=args,
        constraints=",".join(["=r"] + ["r"] * len(args)),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return out


def _multiply_add(a: Array, b: Array, c: Array, emulate: bool) -> Array:
    """a * b + c in float32. Written as such, Triton compiles it to a product and a sum."""
    b = jnp.broadcast_to(b, a.shape)
    if emulate:
        return a * b + c
    (out,) = plgpu.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[a, b, c],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.float32)],
    )
    return out


def _plane_scale(pair: Int32[Array, "rows"], plane: int) -> Float32[Array, "rows"]:
    half = pair & jnp.int32(-65536) if plane % 2 else pair << 16
    return lax.bitcast_convert_type(half, jnp.float32)


def _places(tile: Tile, program: Any, parts: int) -> list[Place]:
    """Those of a program's accumulators, parts side by side."""
    per_block = BLOCK_ROWS // tile.rows
    numbers = [program * tile.count + i for i in range(tile.count)]
    return [Place(n // per_block, n % per_block * tile.rows, part) for n in numbers for part in range(parts)]


def _block_number(blocks: Blocks, expert, place: Place, column_block):
    row = expert * blocks.rows + place.row_block
    return (row * blocks.columns + column_block) * blocks.parts + place.part


def _load_words(ref, blocks: Blocks, expert, place: Place, column_block, rows: int):
    return plgpu.load(ref.at[_block_number(blocks, expert, place, column_block), pl.ds(place.first, rows), :])


def _load_scales(ref, blocks: Blocks, expert, places: Sequence[Place], column_block, rows: int):
    return tuple(
        plgpu.load(ref.at[_block_number(blocks, expert, place, column_block) * PAIRS + pair, pl.ds(place.first, rows)])
        for place in places
        for pair in range(PAIRS)
    )


def _add_plane(total, halves, plane: int, pair, x, tile: Tile, emulate: bool):
    """`total` is over `_factor`."""
    scale = _plane_scale(pair, plane)
    if tile.scale_on == "weight":
        return total + jnp.dot(_weights(halves, plane, scale, emulate), x.T, preferred_element_type=jnp.float32)
    product = jnp.dot(_weights(halves, plane, None, emulate), x.T, preferred_element_type=jnp.float32)
    return _multiply_add(product, scale[:, None], total, emulate)


def _product(words_ref, scales_ref, blocks: Blocks, expert, places, load_x, first, last, tile: Tile, emulate: bool):
    """One [rows, tokens] sum per place over the column blocks from `first` to `last`."""
    scales_of = functools.partial(_load_scales, scales_ref, blocks, expert, places, rows=tile.rows)

    # Scales are loaded one step ahead by hand: they are too small for the asynchronous copies that Triton pipelines.
    def body(column_block, carry):
        totals, scales = list(carry[0]), carry[1]
        following = scales_of(jnp.minimum(column_block + 1, blocks.columns - 1))
        words = [_load_words(words_ref, blocks, expert, place, column_block, tile.rows) for place in places]
        halves = [_halves(one, emulate) for one in words]
        for plane in range(PLANES):
            x = load_x(column_block, plane)
            for i in range(len(places)):
                pair = scales[i * PAIRS + plane // 2]
                totals[i] = _add_plane(totals[i], halves[i], plane, pair, x, tile, emulate)
        return tuple(totals), following

    zero = jnp.zeros((tile.rows, tile.tokens), jnp.float32)
    totals, _ = lax.fori_loop(first, last, body, ((zero,) * len(places), scales_of(first)))
    return [total * _factor(tile, emulate) for total in totals]


def _columns(column_block, plane: int):
    return column_block * BLOCK_COLUMNS + plane * PLANE_COLUMNS + jnp.arange(PLANE_COLUMNS, dtype=jnp.int32)


def _x_loader(x_ref, rows, valid):
    """Rows that do not count are not read."""
    mask = jnp.broadcast_to(valid[:, None], (rows.shape[0], PLANE_COLUMNS))

    def load_x(column_block, plane: int):
        return plgpu.load(x_ref.at[rows[:, None], _columns(column_block, plane)[None, :]], mask=mask, other=0.0)

    return load_x


def _store(ref, rows, valid, place: Place, value, tile: Tile):
    """`value` [rows of the weight, tokens] as columns of the output's `rows`."""
    rows = jnp.where(valid, rows, ref.shape[0])  # interpret mode also writes where the mask is off: out of bounds then
    column = place.row_block * BLOCK_ROWS + place.first + jnp.arange(tile.rows, dtype=jnp.int32)
    mask = jnp.broadcast_to(valid[:, None], (rows.shape[0], tile.rows))
    plgpu.store(ref.at[rows[:, None], column[None, :]], value.T.astype(ref.dtype), mask=mask)


def _swiglu(gate, up):
    return gate / (1 + jnp.exp(-gate)) * up


def _split(column_blocks: int, splits: int):
    """Number and column blocks of this program's share."""
    if splits == 1:
        return 0, 0, column_blocks
    split = pl.program_id(2)
    return split, split * column_blocks // splits, (split + 1) * column_blocks // splits


# --- the kernels ---


def _gate_up_kernel(
    x_ref,
    words_ref,
    scales_ref,
    *refs,
    tile: Tile,
    emulate: bool,
    blocks: Blocks,
    lookup,
    top_k: int,
    publishes: bool,
):
    """`publishes`: also writes the groups, as `align` does, so that the down programs need not look for theirs."""
    *tables, out_ref = refs[:-2] if publishes else refs
    program, group = pl.program_id(0), pl.program_id(1)
    expert, runs, rows, valid = lookup(tables, group)
    split, first, last = _split(blocks.columns, tile.splits)

    if publishes:
        expert_of_group_ref, places_ref = refs[-2:]

        @pl.when((program == 0) & (split == 0))
        def _():
            expert_of_group_ref[group] = jnp.where(runs, expert, -1)
            place = group * tile.tokens + jnp.arange(tile.tokens, dtype=jnp.int32)
            plgpu.store(places_ref.at[place], jnp.where(valid, rows, -1))

    @pl.when(runs)
    def _():
        places = _places(tile, program, 2)
        load_x = _x_loader(x_ref, rows // top_k, valid)
        totals = _product(words_ref, scales_ref, blocks, expert, places, load_x, first, last, tile, emulate)
        for i, place in enumerate(places):
            if tile.splits > 1:
                part_rows = out_ref.shape[0] // (tile.splits * 2)
                below = (split * 2 + place.part) * part_rows
                _store(out_ref, below + rows, valid, place, totals[i], tile)
            elif place.part == 1:
                _store(out_ref, rows, valid, place, _swiglu(totals[i - 1], totals[i]), tile)


def _down_group_kernel(
    h_ref, words_ref, scales_ref, weights_ref, *refs, tile: Tile, emulate: bool, blocks: Blocks, lookup
):
    *tables, out_ref = refs
    program = pl.program_id(0)
    expert, runs, rows, valid = lookup(tables, pl.program_id(1))

    @pl.when(runs)
    def _():
        places = _places(tile, program, 1)
        weight = plgpu.load(weights_ref.at[rows], mask=valid, other=0.0)
        load_h = _x_loader(h_ref, rows, valid)
        totals = _product(words_ref, scales_ref, blocks, expert, places, load_h, 0, blocks.columns, tile, emulate)
        for place, total in zip(places, totals, strict=True):
            _store(out_ref, rows, valid, place, total * weight[None, :], tile)


def _load_h(h_ref, rows, valid, column_blocks: int, splits: int) -> list:
    """All activations [tokens, 32] of the rows, plane by plane. Of partial sums: their SwiGLU."""
    if splits == 1:
        load = _x_loader(h_ref, rows, valid)
    else:
        part_rows = h_ref.shape[0] // (splits * 2)
        parts = [
            [_x_loader(h_ref, (split * 2 + part) * part_rows + rows, valid) for split in range(splits)]
            for part in range(2)
        ]

        def load(column_block, plane: int):
            gate, up = (sum(one(column_block, plane) for one in part) for part in parts)
            return _swiglu(gate, up).astype(jnp.bfloat16)

    return [load(c, plane) for c in range(column_blocks) for plane in range(PLANES)]


def _narrow_product(words_ref, blocks: Blocks, expert, places, scales, h, tile: Tile, emulate: bool):
    """`_product` of activations that are in registers, as are the scales, by column block."""
    totals = []
    for i, place in enumerate(places):
        total = jnp.zeros((tile.rows, h[0].shape[0]), jnp.float32)
        for column_block in range(blocks.columns):
            halves = _halves(_load_words(words_ref, blocks, expert, place, column_block, tile.rows), emulate)
            for plane in range(PLANES):
                pair = scales[column_block][i * PAIRS + plane // 2]
                total = _add_plane(total, halves, plane, pair, h[column_block * PLANES + plane], tile, emulate)
        totals.append(total * _factor(tile, emulate))
    return totals


def _down_group_narrow_kernel(
    h_ref, words_ref, scales_ref, weights_ref, *refs, tile: Tile, emulate: bool, blocks: Blocks, lookup, splits: int
):
    *tables, out_ref = refs
    program = pl.program_id(0)
    expert, runs, rows, valid = lookup(tables, pl.program_id(1))
    first_step, last_step = program * tile.steps, blocks.rows * BLOCK_ROWS // (tile.rows * tile.count) - 1

    @pl.when(runs)
    def _():
        def scales_of(step):
            places = _places(tile, jnp.minimum(first_step + step, last_step), 1)
            return tuple(_load_scales(scales_ref, blocks, expert, places, c, tile.rows) for c in range(blocks.columns))

        scales = scales_of(0)
        weight = plgpu.load(weights_ref.at[rows], mask=valid, other=0.0)
        h = _load_h(h_ref, rows, valid, blocks.columns, splits)

        def body(step, scales):
            following = scales_of(step + 1)
            places = _places(tile, first_step + step, 1)
            totals = _narrow_product(words_ref, blocks, expert, places, scales, h, tile, emulate)
            for place, total in zip(places, totals, strict=True):
                _store(out_ref, rows, valid, place, total * weight[None, :], tile)
            return following

        lax.fori_loop(0, tile.steps, body, scales)


def _down_token_kernel(
    h_ref,
    words_ref,
    scales_ref,
    experts_ref,
    weights_ref,
    out_ref,
    *,
    tile: Tile,
    emulate: bool,
    blocks: Blocks,
    experts: int,
    top_k: int,
    splits: int,
):
    """The columns of the product are the experts of one token: for each expert one of them counts."""
    token = pl.program_id(1)
    places = _places(tile, pl.program_id(0), 1)
    lane = jnp.arange(max(8, pl.next_power_of_2(top_k)), dtype=jnp.int32)
    first = token * top_k
    in_token = lane < top_k
    rows = first + jnp.where(in_token, lane, 0)
    expert_of = plgpu.load(experts_ref.at[rows])
    valid = in_token & (expert_of >= 0) & (expert_of < experts)
    weight = jnp.where(valid, plgpu.load(weights_ref.at[rows]), 0.0)

    def expert_at(k):
        # an expert that is not here has weight 0; reading number 0 in its place keeps the loop without branches
        expert = experts_ref[first + jnp.minimum(k, top_k - 1)]
        return jnp.where((expert >= 0) & (expert < experts), expert, 0)

    def scales_of(expert):
        return tuple(_load_scales(scales_ref, blocks, expert, places, c, tile.rows) for c in range(blocks.columns))

    expert = expert_at(0)
    scales = scales_of(expert)
    h = _load_h(h_ref, rows, valid, blocks.columns, splits)

    def body(k, carry):
        sums, expert, scales = carry
        following = expert_at(k + 1)
        following_scales = scales_of(following)
        totals = _narrow_product(words_ref, blocks, expert, places, scales, h, tile, emulate)
        column = jnp.where(lane == k, weight, 0.0)[None, :]
        sums = tuple(_multiply_add(t, column, s, emulate) for t, s in zip(totals, sums, strict=True))
        return sums, following, following_scales

    zero = jnp.zeros((tile.rows, lane.shape[0]), jnp.float32)
    sums, _, _ = lax.fori_loop(0, top_k, body, ((zero,) * len(places), expert, scales))
    for place, total in zip(places, sums, strict=True):
        column = place.row_block * BLOCK_ROWS + place.first + jnp.arange(tile.rows, dtype=jnp.int32)
        where = (jnp.broadcast_to(token, column.shape), column)
        plgpu.store(out_ref.at[where], jnp.sum(total, axis=1).astype(out_ref.dtype))


def _matmul_kernel(x_ref, words_ref, scales_ref, out_ref, *, tile: Tile, emulate: bool, blocks: Blocks):
    tokens = x_ref.shape[0]
    token = pl.program_id(1) * tile.tokens + jnp.arange(tile.tokens, dtype=jnp.int32)
    valid = token < tokens
    rows = jnp.where(valid, token, 0)
    places = _places(tile, pl.program_id(0), 1)
    split, first, last = _split(blocks.columns, tile.splits)
    load_x = _x_loader(x_ref, rows, valid)
    totals = _product(words_ref, scales_ref, blocks, 0, places, load_x, first, last, tile, emulate)
    for place, total in zip(places, totals, strict=True):
        _store(out_ref, split * tokens + rows, valid, place, total, tile)
