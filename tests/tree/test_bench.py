"""The measuring program of the tree builder, at a size that a CPU runs."""

from __future__ import annotations

import json

import pytest

from kdjax.tree import bench


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_bench_checks_every_tree(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "INPUTS", 2)
    monkeypatch.setattr(bench.timing, "measure", lambda *_: bench.timing.Timing(2.0, 1.0))
    for name, value in (("CASES", ((2, 15),)), ("DEPTH", 3), ("VOCAB", 500)):
        monkeypatch.setattr(bench, name, value)
    bench.main(["--backend", backend, "--out", str(tmp_path / "rows.json")])
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["backend"] == backend
    (row,) = found["rows"]
    assert (row["us"], row["equal_to_reference"]) == (1.0, "4 of 4")
