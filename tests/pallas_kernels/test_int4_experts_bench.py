"""The measuring and tuning programs, with tiny shapes in interpret mode."""

from __future__ import annotations

import functools
import json
import random
import shutil
import time

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import timing
from pallas_kernels.compilers import CompileError, Compilers
from pallas_kernels.int4_experts import bench, tune, tune_mosaic
from pallas_kernels.int4_experts.align import align
from pallas_kernels.int4_experts.bench import Case, Shape
from pallas_kernels.int4_experts.candidates import Waiting, down_candidates, gate_up_candidates
from pallas_kernels.int4_experts.config import TABLES, Config, Rings, Tile, choose, from_json
from pallas_kernels.int4_experts.workload import random_experts

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


def test_tuner_measures_parts_and_layers_and_keeps_the_fastest(on_cpu, tmp_path, monkeypatch):
    out = tmp_path / "rows.json"
    tune.search(SHAPE, [(128, 2)], out, seconds=600.0, most=2, workers=1, backend="interpret")
    found = json.loads(out.read_text())
    parts = {part: [row for row in found["rows"] if row["part"] == part] for part in tune.ENDS}
    assert [len(parts[part]) for part in parts] == [2, 2, 2]
    assert not [row for row in found["rows"] if "failed" in row]
    assert len({json.dumps(row["config"]) for row in parts["layer"]}) == 2
    assert all("score" in row for row in parts["layer"]) and not [row for row in parts["down"] if "score" in row]

    for i, row in enumerate(parts["layer"]):
        row["score"] = 10.0 + (i - 1) ** 2
    out.write_text(json.dumps(found | {"device": "NVIDIA H200"}))
    shutil.copytree(TABLES, tmp_path / "tuned")
    monkeypatch.setattr(tune, "TABLES", tmp_path / "tuned")
    before = json.loads((TABLES / "h200.json").read_text())
    tune.apply([out])
    after = json.loads((tmp_path / "tuned" / "h200.json").read_text())
    best = parts["layer"][1]["config"]
    assert choose(after, 2, 128) == Config(
        best["grouping"], best["down_form"], Tile(**best["gate_up"]), Tile(**best["down"])
    )
    assert after["experts"]["2048"] == before["experts"]["2048"] and after["matmul"] == before["matmul"]


def test_mosaic_tuner_scores_layers_beside_the_triton_choice(on_cpu, tmp_path, monkeypatch):
    """With stand-ins for what runs on Hopper only. The faster of both kernels is kept, Mosaic's beside Triton's."""
    aligned = functools.partial(align, interpret=True)
    monkeypatch.setattr(tune_mosaic, "align", lambda *args, interpret: aligned(*args))
    monkeypatch.setattr(tune_mosaic, "gather", lambda x, g, places, k, interpret: (x[places % x.shape[0]], None))
    monkeypatch.setattr(
        tune_mosaic.mosaic, "product", lambda x, g, words, s, ring: jnp.repeat(x[:, :1], words.shape[1] * 64, axis=1)
    )
    compiled = Case.compile
    monkeypatch.setattr(Case, "compile", lambda case, config, backend: compiled(case, BASE, "interpret"))
    out = tmp_path / "rows.json"
    tune_mosaic.search(SHAPE, [(128, 40)], out, seconds=600.0, threads=1)
    found = json.loads(out.read_text())
    assert not [row["failed"] for row in found["rows"] if "failed" in row]
    triton, *rings = [row for row in found["rows"] if row["part"] == "layer"]
    assert [row["config"]["group"] for row in rings] == tune_mosaic.group_sizes(Case(SHAPE, 128, 40)) == [16]
    assert all(row["score"] > 0 for row in (triton, *rings)) and "kernel" not in triton["config"]

    shutil.copytree(TABLES, tmp_path / "tuned")
    monkeypatch.setattr(tune, "TABLES", tmp_path / "tuned")
    for factor, kernel in ((2.0, Config), (0.5, Rings)):
        rings[0]["score"] = triton["score"] * factor
        out.write_text(json.dumps(found | {"device": "NVIDIA H200"}))
        tune.apply([out])
        table = json.loads((tmp_path / "tuned" / "h200.json").read_text())
        assert isinstance(choose(table, 40, 128, ("mosaic", "triton")), kernel)
        assert choose(table, 40, 128) == from_json(triton["config"])


def test_more_tokens_than_were_tuned_get_the_kernel_of_the_most():
    table = json.loads((TABLES / "h200.json").read_text())
    for inner in (256, 2048):
        assert choose(table, 10**6, inner, ("mosaic", "triton")) == choose(table, 4096, inner, ("mosaic", "triton"))
        assert isinstance(choose(table, 10**6, inner, ("mosaic", "triton")), Rings)


def cell_of(inner: int = 128, tokens: int = 2) -> tune.Cell:
    experts = functools.cache(lambda: random_experts(jax.random.key(3), SHAPE.experts, SHAPE.hidden, inner))
    return tune.Cell(SHAPE, inner, tokens, experts, "interpret")


@pytest.mark.parametrize("grouping,splits", [("row", 2), ("scan", 1), ("align", 1)])
def test_halves_of_a_layer_are_measured_on_their_own_and_must_be_right(on_cpu, grouping, splits):
    """Down reads what gate+up left: partial sums, or groups."""
    cell = cell_of(tokens=3)
    config = Config(grouping, "group", Tile(64, splits=splits), Tile(64))
    gate_up = cell.job("gate_up", config)()
    cell.measure("gate_up", config, gate_up)
    (left,) = cell.feed(config)
    down = cell.job("down", left)()
    cell.measure("down", left, down)
    assert left == config and not [row for row in cell.rows if "failed" in row]
    assert cell.us["down"][left] == pytest.approx(sum((r["uniform_us"] + r["skewed_us"]) / 2 for r in cell.rows))

    cell.measure("down", left, lambda *inputs: [y * 1.0625 for y in down(*inputs)])
    assert cell.rows[-1]["failed"].startswith("ValueError: relative error 6.")
    cell.measure("gate_up", config, lambda *inputs: [(1.0625 * h, *groups) for h, *groups in gate_up(*inputs)])
    assert cell.rows[-1]["failed"].startswith("ValueError: relative error") and "uniform_us" not in cell.rows[-1]


class Clock:
    """Time that passes only where something takes it."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


class InstantCompilers(Compilers):
    """`Compilers` of which each takes `seconds` of the clock for a job."""

    def __init__(self, count: int, seconds: float, clock: Clock) -> None:
        self.count, self.seconds, self.clock = count, seconds, clock
        self.running: list = []
        self.most = 0

    @property
    def idle(self) -> int:
        return self.count - len(self.running)

    def start(self, key, job) -> None:
        assert self.idle
        self.running.append((self.clock.now + self.seconds, key))
        self.most = max(self.most, len(self.running))

    def finished(self, timeout):
        self.clock.now = max(self.clock.now, min(self.clock.now + timeout, min(end for end, _ in self.running)))
        for job in [job for job in self.running if job[0] <= self.clock.now]:
            self.running.remove(job)
            yield job[1], CompileError("nothing")


class TimedCell(tune.Cell):
    """Its measurements take `seconds` of the clock, and its times prefer many stages."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self.seconds, self.clock = seconds, clock
        self.us = {part: {} for part in tune.ENDS}

    def job(self, part, config):
        return pytest.fail

    def measure(self, part, config, program) -> None:
        self.clock.now += self.seconds
        self.us[part][config] = 10.0 - config.gate_up.stages


def climb(monkeypatch, workers: int, compile_s: float, measure_s: float, seconds: float):
    clock = Clock(monkeypatch)
    start, cell = clock.now, TimedCell(measure_s, clock)
    compilers = InstantCompilers(workers, compile_s, clock)
    base = Config("row", "group", Tile(64), Tile(64))
    others = list(gate_up_candidates(Case(Shape(), 256, 9), base, 132))
    assert len(others) > 500
    tune.climb(cell, "gate_up", [base], others, compilers, start + seconds, 1000, random.Random(0))
    return cell.us["gate_up"], clock.now - start, compilers


def test_tens_of_candidates_are_tried_in_the_time_of_a_size(monkeypatch):
    """15 processes that need 1.5 s for a program, 50 ms to measure one, 20 s: what an H200's machine does."""
    times, took, compilers = climb(monkeypatch, 15, 1.5, 0.05, 20.0)
    assert len(times) > 150 and took <= 20.05 and compilers.most == 15


def test_no_measurement_starts_after_the_time_of_a_part(monkeypatch):
    times, took, _ = climb(monkeypatch, 15, 1.0, 0.7, 5.0)
    assert took <= 5.7 and len(times) == 6
    times, took, _ = climb(monkeypatch, 2, 30.0, 0.05, 5.0)
    assert took == 5.0 and not times


def test_programs_that_come_after_their_part_are_dropped(monkeypatch):
    clock = Clock(monkeypatch)
    cell, compilers = TimedCell(0.1, clock), InstantCompilers(2, 3.0, clock)
    first, second = Config("row", "group", Tile(64), Tile(64)), Config("row", "group", Tile(32), Tile(64))
    tune.climb(cell, "gate_up", [first], [second], compilers, clock.now + 1, 9, random.Random(0))
    assert compilers.idle == 0 and not cell.us["gate_up"]
    tune.climb(cell, "down", [first], [], compilers, clock.now + 30, 9, random.Random(0))
    assert list(cell.us["down"]) == [first] and not cell.us["gate_up"]


@pytest.mark.parametrize("inner,tokens", [(256, 1), (256, 17), (256, 330), (2048, 4), (2048, 1024)])
def test_neighbours_of_the_best_come_first(inner, tokens):
    case = Case(Shape(), inner, tokens)
    base = Config("align" if tokens > 16 else "row", "group", Tile(64), Tile(64))
    for candidates in (list(gate_up_candidates(case, base, 132)), list(down_candidates(case, base))):
        assert len(candidates) > 16
        waiting = Waiting([*candidates, *candidates], random.Random(0))
        assert len(waiting) == len(set(candidates))
        near = [waiting.take(base) for _ in range(3)]
        changed = [
            sum(a != b for a, b in zip(vars(c.gate_up).values(), vars(base.gate_up).values(), strict=True))
            + sum(a != b for a, b in zip(vars(c.down).values(), vars(base.down).values(), strict=True))
            for c in near
        ]
        assert max(changed) <= 2 and len(set(near)) == 3
