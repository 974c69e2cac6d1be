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
        table: int32 [programs, 3]; (slot, first block, end block) of the cache blocks that each program reads, empty
            where first = end.
        segments: int32 [slots, 2]; (first, end) of the programs of each slot.
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
    """Chunks of equal size, the smallest for which the configuration's programs are enough."""
    block, programs = config.block, config.chunks(query_rows, lengths.shape[0], rows)
    blocks = -(-jnp.clip(lengths + q, 0, rows) // block)
    size = jnp.arange(1, -(-rows // block) + 1, dtype=jnp.int32)
    needed = jnp.sum(-(-blocks[:, None] // size[None, :]), axis=0)
    # The largest size gives every slot one chunk, which always fits.
    chunk = size[jnp.argmax(needed <= programs)]
    chunks = -(-blocks // chunk)
    end = jnp.cumsum(chunks, dtype=jnp.int32)
    segments = jnp.stack([end - chunks, end], axis=1)

    program = jnp.arange(programs, dtype=jnp.int32)
    slot = jnp.sum(end[None, :] <= program[:, None], axis=1, dtype=jnp.int32)
    live = slot < lengths.shape[0]
    slot = jnp.where(live, slot, 0)
    part, parts = program - segments[slot, 0], jnp.maximum(chunks[slot], 1)
    bounds = jnp.stack([part, part + 1], axis=1) * blocks[slot][:, None] // parts[:, None]
    table = jnp.concatenate([slot[:, None], jnp.where(live[:, None], bounds, 0)], axis=1)
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
