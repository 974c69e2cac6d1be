"""Evaluations: every unit once, whatever fails or is cut short."""

import json
import random
from typing import Any
from unittest import mock

import pytest

from kdjax.config.sweep import read_sweep
from kdjax.errors import KdjaxError
from kdjax.run.experiment import Evaluation, Inputs
from kdjax.run.ledger import Ledger
from kdjax.run.runner import Run, Step
from tests.run import toy, toy_units
from tests.run.test_runner import without_timings

study: Any = toy_units
SWEEP = 'evaluation = "toy"\nx = [1, 2]\nunits = 4\n'


@pytest.fixture
def begin(tmp_path, monkeypatch):
    file = tmp_path / "toy.toml"

    def call(folder, text=SWEEP):
        file.write_text(text)
        return Run(study, read_sweep(file, key="evaluation", kind_of=lambda _: toy_units.Config), tmp_path / folder)

    return call


def finish(run):
    steps = list(run.steps())
    run.summarise(plot=False)
    return steps


def test_the_two_kinds_are_told_apart():
    assert isinstance(toy_units, Evaluation) and not isinstance(toy, Evaluation)


def test_units_are_kept_in_their_order_and_counted(begin, tmp_path):
    steps = finish(begin("r"))
    assert steps[:3] == [Step("x=1"), Step("x=1", units=0, of=4), Step("x=1", units=1, of=4)]
    assert steps[5:8] == [Step("x=1", units=4, of=4), Step("x=1", ended=True), Step("x=2")]
    records = Ledger(tmp_path / "r" / "metrics.jsonl").cells["x=2"]
    assert [record["unit"] for record in records] == ["u0", "u1", "u2", "u3"]


def test_every_unit_is_on_disk_before_the_next_begins(begin, tmp_path):
    steps = begin("r").steps()
    for step in steps:
        if step == Step("x=2", units=2, of=4):
            break
    ledger = Ledger(tmp_path / "r" / "metrics.jsonl")
    assert [r["unit"] for r in ledger.unfinished["x=2"]] == ["u3", "u2"] and list(ledger.cells) == ["x=1"]
    assert [r["unit"] for r in ledger.cells["x=1"]] == ["u0", "u1", "u2", "u3"]


def test_a_file_cut_anywhere_goes_on_with_what_is_missing(begin, tmp_path):
    finish(begin("whole"))
    finish(begin("cut"))
    whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    records = [line for line in whole.splitlines() if b'"unit"' in line]
    for size in [0, len(whole), *random.Random(0).sample(range(len(whole)), 25)]:
        (tmp_path / "cut" / "metrics.jsonl").write_bytes(whole[:size])
        toy_units.measured.clear()
        finish(begin("cut"))
        assert len(toy_units.measured) == len(set(toy_units.measured)) == sum(r not in whole[:size] for r in records)
        assert without_timings(tmp_path / "cut") == without_timings(tmp_path / "whole")


def test_a_record_that_the_disk_lost_is_measured_again(begin, tmp_path):
    finish(begin("whole"))
    finish(begin("lossy"))
    file = tmp_path / "lossy" / "metrics.jsonl"
    first, _, *others = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([first, *others]))
    toy_units.measured.clear()
    finish(begin("lossy"))
    assert toy_units.measured == [(1, "u1")]
    assert without_timings(tmp_path / "lossy") == without_timings(tmp_path / "whole")


def test_a_cell_that_fails_keeps_its_units(begin, tmp_path):
    text = f"{SWEEP}fails = [true]\n"
    run = begin("r", text)
    finish(run)
    assert run.failures == {f"x={x} fails=true": "RuntimeError: as asked for" for x in (1, 2)}
    again = begin("r", text)
    toy_units.measured.clear()
    with mock.patch.object(toy_units, "FAILS_AT", "none"):
        steps = finish(again)
    assert toy_units.measured == [(1, "u0"), (2, "u0")] and not again.failures
    assert Step("x=1 fails=true", units=3, of=4) in steps
    assert [len(records) for records in Ledger(tmp_path / "r" / "metrics.jsonl").cells.values()] == [4, 4]


@pytest.mark.parametrize(
    "yields, said",
    [
        (["u0", "u1", "u1"], "unit 'u1' came twice, or was not asked for"),
        (["u0", "u9"], "unit 'u9' came twice, or was not asked for"),
        (["u0", "u1", "u2"], "1 units have no record, 'u3' among them"),
    ],
)
def test_a_unit_that_is_missing_or_there_twice_is_an_error(begin, yields, said):
    run = begin("r", SWEEP.replace("[1, 2]", "1"))
    with mock.patch.object(toy_units, "measure", lambda config, units: iter([{"unit": u, "y": 1.0} for u in yields])):
        finish(run)
    assert run.failures == {"all": f"RuntimeError: {said}"}


def test_units_are_not_mixed_with_those_of_other_weights(begin, tmp_path):
    steps = begin("r").steps()
    next(step for step in steps if step.units == 1)
    steps.close()
    proof = json.loads((tmp_path / "r" / "provenance.json").read_text())
    (tmp_path / "r" / "provenance.json").write_text(json.dumps(proof | {"backend": "triton"}))
    with pytest.raises(KdjaxError, match="was measured with another backend"):
        list(begin("r").steps())
    (tmp_path / "r" / "metrics.jsonl").unlink()  # nothing is there to be mixed with
    finish(begin("r"))
    assert json.loads((tmp_path / "r" / "provenance.json").read_text())["backend"] == "xla"


def test_provenance_keeps_the_start_every_resumption_and_every_checkpoint(begin, tmp_path, monkeypatch):
    for x in (1, 2):
        (tmp_path / f"model{x}").mkdir()
        (tmp_path / f"model{x}" / "config.json").write_text("{}")
    monkeypatch.setattr(toy_units, "inputs", lambda config: Inputs({"target": tmp_path / f"model{min(config.x, 2)}"}))
    proof = tmp_path / "r" / "provenance.json"
    sweep = SWEEP.replace("[1, 2]", "[1, 2, 3]")
    for units in (1, 2, 3):
        steps = begin("r", sweep).steps()
        next(step for step in steps if step.units == units)
        if units == 1:
            proof.write_text(json.dumps(json.loads(proof.read_text()) | {"started": "first"}))
    kept = json.loads(proof.read_text())
    assert kept["started"] == "first" and len(kept["resumed"]) == 2
    paths = {role: value["path"] for role, value in kept["checkpoints"].items()}
    assert paths == {"target": str(tmp_path / "model1"), "target#2": str(tmp_path / "model2")}
    (tmp_path / "model2" / "config.json").write_text("{ }")
    with pytest.raises(KdjaxError, match=r"was measured with another checkpoints\.target#2\.fingerprint"):
        list(begin("r", sweep).steps())


def test_a_conclusion_that_fails_is_an_error_unless_cells_failed(begin, monkeypatch):
    monkeypatch.setattr(toy_units, "conclude", lambda results: [results[2].name])
    with pytest.raises(IndexError):
        finish(begin("r"))
    run = begin("s", f"{SWEEP}fails = [false, true]\n".replace("[1, 2]", "1"))
    list(run.steps())
    assert "without the cells that failed (IndexError" in run.summarise(plot=False)["findings"][0]
