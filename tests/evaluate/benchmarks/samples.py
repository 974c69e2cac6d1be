"""Files of the benchmarks: miniatures of our own, and samples of the real ones where this machine has them."""

import pathlib

import pytest

MINIATURES = pathlib.Path(__file__).parents[2] / "data" / "evals"
SHARED = pathlib.Path(__file__).parents[4] / "shared" / "data" / "eval"


def sample(name: str) -> pathlib.Path:
    """Skips the test, with the reason, where the file is absent."""
    if not (SHARED / name).exists():
        pytest.skip(f"../shared/data/eval/{name} is absent")
    return SHARED / name
