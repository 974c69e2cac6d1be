"""The measuring and tuning programs, with tiny shapes in interpret mode."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from pallas_kernels import timing
from pallas_kernels.int4_experts import bench, tune
from pallas_kernels.int4_experts.bench import Case, Shape
from pallas_kernels.int4_experts.config import TABLES, Config, Tile, choose

SHAPE = Shape(experts=8, hidden=128, top_k=2)
BASE = Config("row", "token", Tile(32, warps=2), Tile(64))


@pytest.fixture
def on_cpu(monkeypatch):
    """Ceilings of round numbers, one input per case, few repetitions."""
    monkeypatch.setattr(timing, "read_ceiling", lambda *_: 100.0)
    monkeypatch.setattr(timing, "matmul_peak", lambda *_: 1.0)
    monkeypatch.setattr(bench, "INPUTS", (1, 1, 1))
    measure = timing.measure
    monkeypatch.setattr(timing, "measure", lambda f, s, i, **_: measure(f, s, i, repetitions=1, min_ops=1))


def test_bench_yields_a_row(on_cpu):
    case = Case(SHAPE, inner=128, tokens=2)
    (row,) = bench.rows([case], [BASE], "interpret", None, threads=1)
    assert (row["tokens"], row["intermediate"], row["routing"]) == (2, 128, "uniform")
    assert row["relative_error"] < tune.MAX_ERROR and row["us"] > 0 and row["marlin_us"] is None
    assert row["fraction_of_matmul_peak"] == pytest.approx(2 * 3 * 2 * 2 * 128 * 128 / row["us"] / 1e6, abs=1e-4)


def test_marlin_is_scaled_on_other_gpus_only():
    case = Case(Shape(), inner=256, tokens=1)
    assert bench.marlin_us(case, 1000.0, "NVIDIA H200") == 34.6
    assert bench.marlin_us(case, 1865.0, "NVIDIA RTX PRO 6000 Blackwell") == pytest.approx(69.2)
    assert bench.marlin_us(Case(Shape(), 256, 1, "skewed"), 1000.0, "NVIDIA H200") is None


def test_tuner_keeps_the_fastest_correct_configuration(on_cpu, tmp_path, monkeypatch):
    out = tmp_path / "rows.json"
    tune.search(SHAPE, [(128, 2)], out, seconds=600.0, candidates=1, threads=1, backend="interpret")
    found = json.loads(out.read_text())
    assert len(found["rows"]) == 5 and all("score" in row for row in found["rows"])
    assert len({json.dumps(row["config"]) for row in found["rows"]}) == 5

    for i, row in enumerate(found["rows"]):
        row["score"] = 10.0 + (i - 3) ** 2
    out.write_text(json.dumps(found | {"device": "NVIDIA H200"}))
    shutil.copytree(TABLES, tmp_path / "tuned")
    monkeypatch.setattr(tune, "TABLES", tmp_path / "tuned")
    before = json.loads((TABLES / "h200.json").read_text())
    tune.apply([out])
    after = json.loads((tmp_path / "tuned" / "h200.json").read_text())
    best = found["rows"][3]["config"]
    assert choose(after, 2, 128) == Config(
        best["grouping"], best["down_form"], Tile(**best["gate_up"]), Tile(**best["down"])
    )
    assert after["experts"]["2048"] == before["experts"]["2048"] and after["matmul"] == before["matmul"]


@pytest.mark.parametrize("inner,tokens", [(256, 1), (256, 17), (256, 330), (2048, 4), (2048, 1024)])
def test_neighbours_of_the_best_come_first(inner, tokens):
    case = Case(Shape(), inner, tokens)
    base = Config("align" if tokens > 16 else "row", "group", Tile(64), Tile(64))
    for candidates in (list(tune.gate_up_candidates(case, base, 132)), list(tune.down_candidates(case, base))):
        assert len(candidates) > 16
        near = tune.nearest(candidates, base, 3, random.Random(0))
        changed = [
            sum(a != b for a, b in zip(vars(c.gate_up).values(), vars(base.gate_up).values(), strict=True))
            + sum(a != b for a, b in zip(vars(c.down).values(), vars(base.down).values(), strict=True))
            for c in near
        ]
        assert max(changed) <= 2
