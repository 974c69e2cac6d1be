"""Tile sizes per device kind: the nearest tuned case of tuned.json."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from importlib import resources

import jax.numpy as jnp

TILE = 64  # query rows that a program takes at most


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    rows: query rows (token x head) per program.
    block: cache rows per step.
    programs: programs in all, row tiles times chunks; every slot gets at least one chunk.
    num_warps, num_stages: of the Triton kernel.
    split_scores: see `_scores` in triton.py; helps with 64 rows and 8 warps.
    kernel: "triton" or "mosaic".
    """

    rows: int
    block: int
    programs: int
    num_warps: int = 8
    num_stages: int = 2
    split_scores: bool = False
    kernel: str = "triton"

    def chunks(self, query_rows: int, slots: int, cache_rows: int) -> int:
        """Programs along the prefix."""
        tiles = -(-query_rows // self.rows)
        blocks = slots * -(-cache_rows // self.block)
        return max(slots, min(self.programs // tiles, blocks))


@functools.cache
def _tables() -> dict[str, list[dict]]:
    return json.loads((resources.files("pallas_kernels.tree_attention") / "tuned.json").read_text(encoding="utf-8"))


def mosaic_unfit(rank: int, rope: int, cache_rows: int, dtype: jnp.dtype, cache_dtype: jnp.dtype) -> str:
    """Why the Mosaic kernel cannot take these sizes; empty where it can."""
    if (rank, rope) != (512, 64):
        return f"takes a latent of 512 and a rotary part of 64 columns, not {rank} and {rope}"
    if not dtype == cache_dtype == jnp.bfloat16:
        return f"takes bfloat16 queries and cache, not {jnp.dtype(dtype).name} and {jnp.dtype(cache_dtype).name}"
    return f"takes cache rows in multiples of 8, not {cache_rows}" if cache_rows % 8 else ""


def choose(
    device_kind: str,
    query_rows: int,
    slots: int,
    cache_rows: int,
    dtype: jnp.dtype,
    cache_dtype: jnp.dtype,
    kernels: tuple[str, ...] = ("triton",),
) -> Config:
    """The tuned case nearest in powers of two, more query rows than a tile's in whole tiles.

    Unknown devices use the table "default".

    Float32 queries and one-byte caches need other shared memory than bf16, and have tables of their own.

    Args:
        kernels: those that may be chosen, the first of them where both are tuned for a case.

    Raises:
        NotImplementedError: none of `kernels` is tuned for this device and dtype.
    """
    tables = _tables()
    table = tables.get(device_kind, tables["default"])
    if dtype == jnp.float32:
        table = tables["float32"]
    elif jnp.dtype(cache_dtype).itemsize == 1:
        table = tables.get(f"{device_kind}, one-byte cache", table)
    asked = {"query_rows": query_rows, "slots": slots, "cache_rows": cache_rows}
    allowed = [case for case in table if case["config"].get("kernel", "triton") in kernels]
    if not allowed:
        raise NotImplementedError(f"tree_attention: {' and '.join(kernels)} cannot run on {device_kind}: use 'triton'")

    def preference(case: dict) -> tuple[float, int]:
        distance = sum(abs(math.log2(_paid(name, size) / _paid(name, case[name]))) for name, size in asked.items())
        return distance, kernels.index(case["config"].get("kernel", "triton"))

    return Config(**min(allowed, key=preference)["config"])


def _paid(name: str, size: int) -> int:
    return -(-size // TILE) * TILE if name == "query_rows" and size > TILE else size
