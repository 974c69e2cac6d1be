"""Tile sizes of prefill attention per device kind and number of query rows."""

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
    tokens: query tokens per program.
    block: keys per step.
    """

    tokens: int
    block: int
    num_warps: int
    num_stages: int


@functools.cache
def _tables() -> dict[str, list[dict]]:
    return json.loads((resources.files("pallas_kernels.prefill_attention") / "tuned.json").read_text(encoding="utf-8"))


def choose(device_kind: str, dtype: jnp.dtype, query_rows: int) -> Config:
    """The tuned entry nearest in powers of two of slots * tokens * heads; unknown devices use the table "default".

    Few rows need narrow tiles, or there are fewer programs than the device has multiprocessors.
    """
    tables = _tables()
    table = tables["float32"] if dtype == jnp.float32 else tables.get(device_kind, tables["default"])
    return Config(**min(table, key=lambda case: abs(math.log2(query_rows / case["query_rows"])))["config"])
