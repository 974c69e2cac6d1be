"""What the layers of one forward share: which program reads which part of which cache, and packed ancestor masks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.tree_attention.config import Config

WORD_BITS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Made once per forward from lengths and mask; it depends on no layer.

    Attributes:
        words: int32 [slots, q, ceil(q / 32)]; bit j % 32 of word j // 32 says that the token sees tree token j. None
            for the causal chain. For the Mosaic kernel [slots, ceil(q / 32), rows], a word per query row and never
            None.
        table: int32 [programs, 4]; (slot, first block, end block, place) of the cache blocks that each program reads,
            empty where first = end, and of its partial result.
        segments: int32 [slots, 2]; (first, end) of the places of each slot.
        config: the tile sizes that the rest is for.
    """

    # Any: as a pytree it also carries shardings and the like in place of its arrays.
    words: Any
    table: Any
    segments: Any
    config: Config = dataclasses.field(metadata={"static": True})


def make_plan(
    lengths: Int32[Array, "slots"],
    ancestors: Bool[Array, "slots q q"] | None,
    *,
    query_rows: int,
    q: int,
    rows: int,
    config: Config,
) -> Plan:
    """Chunks of equal size, and what each slot has left; the smallest size that the configuration's programs can do.

    What is left over comes last: multiprocessors that have no chunk do it, one after the other.
    """
    block, slots = config.block, lengths.shape[0]
    units = config.chunks(query_rows, slots, rows)
    blocks = -(-jnp.clip(lengths + q, 0, rows) // block)
    size = jnp.arange(1, -(-rows // block) + 1, dtype=jnp.int32)[:, None]
    whole, left = blocks[None, :] // size, blocks[None, :] % size
    in_turn = 1 / jnp.maximum(size // jnp.maximum(left, 1), 1)  # of the time of a chunk
    needed = jnp.sum(whole.astype(jnp.float32) + jnp.where(left > 0, in_turn, 0.0), axis=1)
    # The largest size gives every slot one chunk at most, which always fits.
    chunk = size[jnp.argmax(needed <= units), 0]
    whole, left = blocks // chunk, jnp.minimum(blocks % chunk, 1)
    end = jnp.cumsum(whole + left, dtype=jnp.int32)
    segments = jnp.stack([jnp.pad(end[:-1], (1, 0)), end], axis=1)

    program = jnp.arange(units + slots, dtype=jnp.int32)
    counts = jnp.concatenate([whole, left])  # of chunks, then of what is left
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    of = jnp.sum(ends[None, :] <= program[:, None], axis=1, dtype=jnp.int32)
    live = of < 2 * slots
    of = jnp.where(live, of, 0)
    slot = of % slots
    part = program - (ends - counts)[of] + jnp.where(of < slots, 0, whole[slot])
    first = part * chunk
    row = jnp.stack([slot, first, jnp.minimum(first + chunk, blocks[slot]), segments[slot, 0] + part], axis=1)
    table = jnp.where(live[:, None], row, 0)
    if config.kernel == "mosaic":
        return Plan(_words_of_rows(ancestors, lengths.shape[0], q, query_rows, config.rows), table, segments, config)
    return Plan(None if ancestors is None else pack(ancestors), table, segments, config)


def _words_of_rows(
    ancestors: Bool[Array, "slots q q"] | None, slots: int, q: int, query_rows: int, tile: int
) -> Int32[Array, "slots words rows"]:
    """Rows are padded to whole tiles."""
    if ancestors is None:
        ancestors = jnp.broadcast_to(jnp.tril(jnp.ones((q, q), bool)), (slots, q, q))
    words = jnp.repeat(pack(ancestors), query_rows // q, axis=1)
    return jnp.pad(words, ((0, 0), (0, -query_rows % tile), (0, 0))).transpose(0, 2, 1)


def pack(ancestors: Bool[Array, "slots q q"]) -> Int32[Array, "slots q words"]:
    slots, q, _ = ancestors.shape
    words = -(-q // WORD_BITS)
    bits = jnp.pad(ancestors, ((0, 0), (0, 0), (0, words * WORD_BITS - q))).reshape(slots, q, words, WORD_BITS)
    weights = jnp.left_shift(jnp.uint32(1), jnp.arange(WORD_BITS, dtype=jnp.uint32))
    packed = jnp.sum(jnp.where(bits, weights, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
    return packed.view(jnp.int32)
