"""The measuring and tuning programs, with tiny shapes in interpret mode."""

from __future__ import annotations

import json

import pytest

from pallas_kernels import timing
from pallas_kernels.tree_attention import bench, tune
from pallas_kernels.tree_attention.cases import Case
from pallas_kernels.tree_attention.config import Config

CASE = Case(heads=2, tokens=3, streams=2, prefix=64)
CONFIGS = [Config(16, 64, 2, 4, 2), Config(16, 32, 4, 4, 2)]


@pytest.fixture
def on_cpu(monkeypatch):
    """Ceilings of round numbers, one cache per case, few repetitions."""
    monkeypatch.setattr(timing, "read_ceiling", lambda: 100.0)
    monkeypatch.setattr(timing, "matmul_peak", lambda: 1.0)
    monkeypatch.setattr("pallas_kernels.tree_attention.cases.MAX_COPIES", 1)
    measure = timing.measure
    monkeypatch.setattr(timing, "measure", lambda f, s, i, **_: measure(f, s, i, repetitions=1, min_ops=1))


def test_bench_writes_its_rows(on_cpu, tmp_path):
    bench.run((CASE,), tmp_path / "rows.json", None, seconds=60.0, threads=1, backend="interpret")
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["heads"], row["tokens"], row["streams"], row["prefix"]) == (2, 3, 2, 64)
    assert row["us"] > 0 and row["error"] < tune.LARGEST_ERROR and row["chain_peer_us"] is None


def test_tuner_keeps_the_fastest_correct_candidate(on_cpu, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "candidates", lambda *_: CONFIGS)
    results, table = tmp_path / "results.json", tmp_path / "tuned.json"
    tune.search((CASE,), results, seconds=60.0, threads=1, backend="interpret")
    found = json.loads(results.read_text())
    assert [row["config"]["programs"] for row in found["rows"][1:]] == [2, 4]
    assert all(row["error"] < tune.LARGEST_ERROR for row in found["rows"])

    found["rows"][0]["us"], found["rows"][1]["us"], found["rows"][2]["us"] = 3.0, 2.0, 1.0
    found["rows"][2]["error"] = 0.5
    results.write_text(json.dumps(found))
    table.write_text('{"default": [], "' + found["device"] + '": []}')
    monkeypatch.setattr(tune, "TUNED", table)
    tune.apply([results])
    (entry,) = json.loads(table.read_text())[found["device"]]
    assert (entry["query_rows"], entry["slots"], entry["cache_rows"]) == (6, 2, 128)
    assert Config(**entry["config"]) == CONFIGS[0]


@pytest.mark.parametrize("us,kernels", [(1.0, ["mosaic", "triton"]), (3.0, ["triton"])])
def test_mosaic_enters_the_table_where_it_is_faster(tmp_path, monkeypatch, us, kernels):
    results, table = tmp_path / "results.json", tmp_path / "tuned.json"
    size = {"query_rows": 64, "slots": 1, "cache_rows": 128, "error": 0.001}
    mosaic, triton = {"programs": 2, "kernel": "mosaic"}, {"programs": 3}
    rows = [
        size | {"us": us, "config": {"rows": 64, "block": 64} | mosaic},
        size | {"us": 2.0, "config": {"rows": 64, "block": 64} | triton},
    ]
    results.write_text(json.dumps({"device": "some", "rows": rows}))
    table.write_text(json.dumps({"some": [{**size, "config": {"rows": 64, "block": 64} | mosaic}]}))
    monkeypatch.setattr(tune, "TUNED", table)
    tune.apply([results])
    assert [c["config"].get("kernel", "triton") for c in json.loads(table.read_text())["some"]] == kernels
