"""Tile sizes of prefill attention per device kind."""

from __future__ import annotations

import dataclasses
import functools
import json
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
def _tables() -> dict[str, dict]:
    return json.loads((resources.files(__package__) / "tuned.json").read_text(encoding="utf-8"))


def choose(device_kind: str, dtype: jnp.dtype) -> Config:
    """The tuned entry of the device; unknown devices use "default"."""
    tables = _tables()
    return Config(**(tables["float32"] if dtype == jnp.float32 else tables.get(device_kind, tables["default"])))
