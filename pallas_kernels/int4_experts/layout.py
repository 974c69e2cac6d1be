"""INT4 matrices as the kernels read them, made once, at load, from compressed-tensors `pack-quantized` arrays.

A block is 64 rows by 128 columns. A row of it is 32 words of 16 bits; nibble i of word c is column 32 i + c of the
block, so that one nibble plane is 32 columns in their natural order under one scale. The blocks of 64 rows follow each
other along the columns (the direction a program walks), gate and up side by side. Scales sit in pairs, bf16 in int32
words: word q of a row has those of planes 2q (low half) and 2q + 1 (high half).

Rows and columns are padded with zeros to multiples of 128. Scales of groups larger than 32 are repeated.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Int16, Int32, UInt32

BLOCK_ROWS = 64
BLOCK_COLUMNS = 128
PLANES = 4
PAIRS = PLANES // 2  # of scales, in a row of a block
PLANE_COLUMNS = 32
PAD = 128
GROUPS = (32, 64, 128)

Words = Int16[Array, "experts row_blocks column_blocks parts 64 32"]
Scales = Int32[Array, "experts row_blocks column_blocks parts 2 64"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedExperts:
    """Gate, up [experts, inner, hidden] and down [experts, hidden, inner] in `pack-quantized` layout.

    Attributes:
        *_packed: uint32 [experts, rows, columns / 8], lowest nibble first, stored as value + 8.
        *_scale: bfloat16 [experts, rows, columns / group_size].
    """

    # Any: as a pytree it also carries shape structs and shardings in place of its arrays.
    gate_packed: Any
    gate_scale: Any
    up_packed: Any
    up_scale: Any
    down_packed: Any
    down_scale: Any
    group_size: int = dataclasses.field(metadata={"static": True}, default=32)

    @property
    def experts(self) -> int:
        """How many."""
        return self.gate_packed.shape[0]

    @property
    def hidden(self) -> int:
        """Width of their input and output."""
        return self.gate_packed.shape[2] * 8

    @property
    def inner(self) -> int:
        """Width between gate and down."""
        return self.gate_packed.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TiledExperts:
    """`PackedExperts` in the layout of the kernels (module docstring).

    Attributes:
        gate_up_words: int16 [experts, inner / 64, hidden / 128, 2, 64, 32], widths padded to 128.
        gate_up_scales: int32 [experts, inner / 64, hidden / 128, 2, 2, 64].
        down_words: int16 [experts, hidden / 64, inner / 128, 1, 64, 32].
        down_scales: int32 [experts, hidden / 64, inner / 128, 1, 2, 64].
    """

    gate_up_words: Any
    gate_up_scales: Any
    down_words: Any
    down_scales: Any

    @property
    def experts(self) -> int:
        """How many."""
        return self.gate_up_words.shape[0]

    @property
    def hidden(self) -> int:
        """Padded."""
        return self.down_words.shape[1] * BLOCK_ROWS

    @property
    def inner(self) -> int:
        """Padded."""
        return self.gate_up_words.shape[1] * BLOCK_ROWS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TiledMatrix:
    """One INT4 matrix [rows, columns] in the layout of the kernels, as a stack of one.

    Attributes:
        words: int16 [1, rows / 64, columns / 128, 1, 64, 32], widths padded to 128.
        scales: int32 [1, rows / 64, columns / 128, 1, 2, 64].
    """

    words: Any
    scales: Any
    rows: int = dataclasses.field(metadata={"static": True})
    columns: int = dataclasses.field(metadata={"static": True})


def padded(width: int) -> int:
    return -(-width // PAD) * PAD


@jax.jit
def tile_experts(experts: PackedExperts) -> TiledExperts:
    """What the kernels read, from the layout of the checkpoint.

    Raises:
        NotImplementedError: a group size or a width that the kernels do not take.
    """
    e = experts
    check_widths("int4_experts", e.group_size, hidden=e.hidden, inner=e.inner)
    gate, up = (e.gate_packed, e.gate_scale), (e.up_packed, e.up_scale)
    gate_up_words, gate_up_scales = _tile((gate, up), e.group_size)
    down_words, down_scales = _tile(((e.down_packed, e.down_scale),), e.group_size)
    return TiledExperts(gate_up_words, gate_up_scales, down_words, down_scales)


@functools.partial(jax.jit, static_argnames="group_size")
def tile_matrix(
    packed: UInt32[Array, "rows words"], scale: BFloat16[Array, "rows groups"], *, group_size: int
) -> TiledMatrix:
    """`tile_experts` for one matrix.

    Raises:
        NotImplementedError: a group size or a width that the kernels do not take.
    """
    check_widths("int4_matmul", group_size, columns=packed.shape[1] * 8)
    words, scales = _tile(((packed[None], scale[None]),), group_size)
    return TiledMatrix(words, scales, packed.shape[0], packed.shape[1] * 8)


def _tile(parts: tuple[tuple[Array, Array], ...], group_size: int) -> tuple[Words, Scales]:
    _, rows, packed_columns = parts[0][0].shape

    # One expert after the other: unpacked nibbles of all of them would not fit beside the weights.
    def one(arrays: tuple[tuple[Array, Array], ...]) -> tuple[Array, Array]:
        words = jnp.stack([_words(packed, rows) for packed, _ in arrays], axis=2)
        scales = jnp.stack([_scales(scale, rows, packed_columns * 8, group_size) for _, scale in arrays], axis=2)
        return words, scales

    return lax.map(one, parts)


def check_widths(op: str, group_size: int, **widths: int) -> None:
    if group_size not in GROUPS:
        raise NotImplementedError(f"{op}: {group_size=} is not supported; supported: {', '.join(map(str, GROUPS))}")
    for name, width in widths.items():
        if width % group_size:
            raise NotImplementedError(f"{op}: {name}={width} is not a multiple of {group_size=}: pad the weights")


def _words(packed: UInt32[Array, "rows words"], rows: int) -> Int16[Array, "row_blocks column_blocks 64 32"]:
    zero = jnp.uint32(0x88888888)
    columns = packed.shape[1] * 8
    packed = jnp.pad(packed, ((0, padded(rows) - rows), (0, (padded(columns) - columns) // 8)), constant_values=zero)
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32)[None, None, :]
    nibbles = ((packed[:, :, None] >> shifts) & jnp.uint32(15)).astype(jnp.uint16)
    planes = nibbles.reshape(-1, BLOCK_ROWS, padded(columns) // BLOCK_COLUMNS, PLANES, PLANE_COLUMNS)
    words = sum(planes[:, :, :, i] << jnp.uint16(4 * i) for i in range(PLANES))
    return lax.bitcast_convert_type(words, jnp.int16).swapaxes(1, 2)


def _scales(
    scale: BFloat16[Array, "rows groups"], rows: int, columns: int, group_size: int
) -> Int32[Array, "row_blocks column_blocks 2 64"]:
    scale = jnp.repeat(scale, group_size // PLANE_COLUMNS, axis=1)
    scale = jnp.pad(scale, ((0, padded(rows) - rows), (0, (padded(columns) - columns) // PLANE_COLUMNS)))
    pairs = lax.bitcast_convert_type(scale.reshape(padded(rows), -1, 2), jnp.int32)
    return pairs.reshape(-1, BLOCK_ROWS, padded(columns) // BLOCK_COLUMNS, 2).transpose(0, 2, 3, 1)
