"""Tile sizes per device kind: the nearest tuned case of tuned.json."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from importlib import resources

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    rows: query rows (token x head) per program.
    block: cache rows per step.
    programs: programs in all, row tiles times chunks; every slot gets at least one chunk.
    split_scores: see `_scores` in triton.py; helps with 64 rows and 8 warps.
    merge_columns, merge_parts: columns per merge program, partial results it loads at once.
    """

    rows: int
    block: int
    programs: int
    num_warps: int
    num_stages: int
    split_scores: bool = False
    merge_columns: int = 128
    merge_parts: int = 64
    merge_warps: int = 4

    def chunks(self, query_rows: int, slots: int, cache_rows: int) -> int:
        """Programs along the prefix."""
        tiles = -(-query_rows // self.rows)
        blocks = slots * -(-cache_rows // self.block)
        return max(slots, min(self.programs // tiles, blocks))


@functools.cache
def _tables() -> dict[str, list[dict]]:
    return json.loads((resources.files("pallas_kernels.tree_attention") / "tuned.json").read_text(encoding="utf-8"))


def choose(
    device_kind: str, query_rows: int, slots: int, cache_rows: int, dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> Config:
    """The tuned case nearest in powers of two; unknown devices use the table "default".

    Float32 queries and one-byte caches need other shared memory than bf16, and have tables of their own.
    """
    tables = _tables()
    table = tables.get(device_kind, tables["default"])
    if dtype == jnp.float32:
        table = tables["float32"]
    elif jnp.dtype(cache_dtype).itemsize == 1:
        table = tables.get(f"{device_kind}, one-byte cache", table)
    asked = {"query_rows": query_rows, "slots": slots, "cache_rows": cache_rows}

    def distance(case: dict) -> float:
        return sum(abs(math.log2(size / case[name])) for name, size in asked.items())

    return Config(**min(table, key=distance)["config"])
