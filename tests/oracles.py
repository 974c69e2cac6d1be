"""Golden data from third-party code: small copies in `tests/data`, the full set in `../shared/oracles` when present."""

from __future__ import annotations

import json
import pathlib
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors.numpy needs
import numpy as np
import pytest
from safetensors.numpy import load_file

HERE = pathlib.Path(__file__).parent / "data"
SHARED = pathlib.Path(__file__).parents[2] / "shared" / "oracles"


class Oracle(NamedTuple):
    path: pathlib.Path
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    meta: dict[str, Any]

    @property
    def checkpoint(self) -> pathlib.Path:
        return self.path / "checkpoint"


def find(name: str) -> pathlib.Path:
    """The folder of a case; skips the test, with the reason, where this machine does not have it."""
    for root in (HERE, SHARED):
        if (root / name).is_dir():
            return root / name
    pytest.skip(f"oracle {name} is not in tests/data and ../shared/oracles is absent")


def load(name: str) -> Oracle:
    path = find(name)

    def tensors(stem: str) -> dict[str, np.ndarray]:
        file = path / f"{stem}.safetensors"
        return load_file(file) if file.exists() else {}

    meta = path / "expected.json"
    return Oracle(path, tensors("inputs"), tensors("expected"), json.loads(meta.read_text()) if meta.exists() else {})
