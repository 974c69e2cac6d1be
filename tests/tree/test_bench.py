"""The measuring program of the tree builder, at a size that a CPU runs."""

from __future__ import annotations

import json

from kdjax.tree import bench


def test_bench_checks_every_tree(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "INPUTS", 2)
    monkeypatch.setattr(bench.timing, "measure", lambda *_: bench.timing.Timing(2.0, 1.0))
    bench.run(((2, 15),), tmp_path / "rows.json", 3, 500)
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["us"], row["equal_to_reference"]) == (1.0, "4 of 4")
