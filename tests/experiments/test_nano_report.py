"""The picture and the compact curves of a finished run."""

import json
import pathlib

import pytest

from experiments.nano import report
from experiments.nano.config import NanoConfig
from kdjax.config import load
from kdjax.errors import KdjaxError

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = load(NanoConfig, ROOT / "configs/experiments/nano.toml")


@pytest.fixture
def folder(tmp_path):
    for stage, extra in (("target", {}), ("drafter", {"slot1": 0.7, "slot3": 0.5, "slot7": 0.2})):
        (tmp_path / stage).mkdir()
        steps = [{"step": i, "progress": i / 10, "loss": 2.123456789, **extra} for i in range(10)]
        lines = [*steps, {"step": 10, "seconds": 1.0, "bpb/py_x": 1.0}]
        (tmp_path / stage / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_picture_and_curves(folder):
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    shares = {"without_loops": {"acceptance_by_depth": [0.9, 0.8]}}
    (folder / "evaluation.json").write_text(json.dumps({"acceptance": {"tree-15-T0": {"python": shares}}}))
    report.run(CONFIG, folder)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    assert [r["stage"] for r in records] == ["target"] * 11 + ["drafter"] * 11
    assert records[0]["loss"] == 2.1235 and records[10]["bpb/py_x"] == 1.0


def test_missing_results_are_named(folder):
    with pytest.raises(KdjaxError, match="run the stage evaluate first"):
        report.run(CONFIG, folder)
