"""What the layers of one forward share: which program reads which part of which cache, and packed ancestor masks."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

WORD_BITS = 32


class Plan(NamedTuple):
    """Made once per forward from lengths and mask; it depends on no layer.

    Attributes:
        words: bit j % 32 of word j // 32 says that the token sees tree token j; None for the causal chain.
        table: (slot, first block, end block) of the cache blocks that each program reads; empty where first = end.
        segments: (first, end) of the programs of each slot.
    """

    words: Int32[Array, "slots q words"] | None
    table: Int32[Array, "programs 3"]
    segments: Int32[Array, "slots 2"]


def make_plan(
    lengths: Int32[Array, "slots"],
    ancestors: Bool[Array, "slots q q"] | None,
    *,
    q: int,
    rows: int,
    block: int,
    programs: int,
) -> Plan:
    """Chunks of equal size, the smallest for which `programs` (at least one per slot) are enough."""
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
    return Plan(None if ancestors is None else pack(ancestors), table, segments)


def pack(ancestors: Bool[Array, "slots q q"]) -> Int32[Array, "slots q words"]:
    slots, q, _ = ancestors.shape
    words = -(-q // WORD_BITS)
    bits = jnp.pad(ancestors, ((0, 0), (0, 0), (0, words * WORD_BITS - q))).reshape(slots, q, words, WORD_BITS)
    weights = jnp.left_shift(jnp.uint32(1), jnp.arange(WORD_BITS, dtype=jnp.uint32))
    packed = jnp.sum(jnp.where(bits, weights, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
    return packed.view(jnp.int32)
