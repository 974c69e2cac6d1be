"""Sweeps: every cell once, whatever fails or is killed; and the comparison of two runs."""

import json
import random
import signal
import subprocess
import sys
import time

import msgspec
import pytest

import experiments
from kdjax import cli
from kdjax.config.sweep import read_sweep
from kdjax.errors import KdjaxError
from kdjax.run import plot
from kdjax.run.ledger import Ledger
from kdjax.run.runner import Run, Step
from tests.cli.conftest import cache as cache
from tests.cli.conftest import foreground as foreground
from tests.run import toy

SWEEP = 'experiment = "toy"\nx = [1, 2, 3, 4]\nunits = 3\n'


@pytest.fixture(autouse=True)
def registered(monkeypatch, cache):
    monkeypatch.setenv("KDJAX_CACHE_DIR", str(cache))
    monkeypatch.setitem(experiments.EXPERIMENTS, "toy", "toy")
    monkeypatch.setitem(sys.modules, "experiments.toy", toy)


@pytest.fixture
def kdjax(tmp_path, capsys):
    file = tmp_path / "toy.toml"
    file.write_text(SWEEP)

    def call(*args, plots=False):
        without = [] if plots or args[0] != "run" else ["--no-plots"]
        status = cli.main([*(str(file) if a == "TOML" else str(a) for a in args), *without])
        return status, *capsys.readouterr()

    return call


def read(folder, name):
    return json.loads((folder / name).read_text())


def without_timings(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().split(b"\n") if line]
    for line in lines:
        line.pop("timings", None)
    summary = read(folder, "summary.json")
    for cell in summary["cells"].values():
        cell.pop("seconds")
    return lines, summary


def test_a_run_leaves_config_provenance_metrics_summary_and_plot(kdjax, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    status, out, _ = kdjax("run", "TOML", "--out", tmp_path / "r", plots=True)
    assert status == 0 and "x=4 is 17 high" in out and "x squared, mean over units" in out
    names = {file.name for file in (tmp_path / "r").iterdir()}
    assert names == {"config.toml", "provenance.json", "metrics.jsonl", "summary.json", "plot.png"}
    assert read(tmp_path / "r", "summary.json")["cells"]["x=2"]["height"]["value"] == 5.0
    assert read(tmp_path / "r", "provenance.json")["devices"]
    assert (tmp_path / "r" / "plot.png").read_bytes().startswith(b"\x89PNG")
    again = kdjax("run", tmp_path / "r" / "config.toml", "--print-config")[1]
    assert again == (tmp_path / "r" / "config.toml").read_text()


def test_a_finished_run_is_shown_again_and_not_measured_again(kdjax, tmp_path):
    kdjax("run", "TOML", "--out", tmp_path / "r")
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    status, out, err = kdjax("run", "TOML", "--out", tmp_path / "r")
    assert status == 0 and "4 of 4 cells are there already" in err and "x=4 is 17 high" in out
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == before


def test_a_failed_cell_loses_no_other_and_is_tried_again(kdjax, tmp_path):
    (tmp_path / "toy.toml").write_text('experiment = "toy"\nx = 1\nfails = [false, true]\n')
    status, out, err = kdjax("run", "TOML", "--out", tmp_path / "r")
    assert status == 1 and "cell fails=true failed: RuntimeError: as asked for" in err and "failed" in out
    summary = read(tmp_path / "r", "summary.json")
    assert list(summary["cells"]) == ["fails=false"] and summary["failed"] == {
        "fails=true": "RuntimeError: as asked for"
    }
    assert "in measure" in (tmp_path / "r" / "errors.log").read_text()
    ledger = Ledger(tmp_path / "r" / "metrics.jsonl")
    assert len(ledger.cells["fails=false"]) == 3 and "fails=true" not in ledger.cells
    assert ledger.failures == summary["failed"]
    toy_measure, toy.measure = toy.measure, lambda config: iter([{"unit": "u0", "y": 1.0, "weight": 1}])
    try:
        assert kdjax("run", "TOML", "--out", tmp_path / "r")[0] == 0
    finally:
        toy.measure = toy_measure
    assert read(tmp_path / "r", "summary.json")["failed"] == {}


def test_a_full_disk_ends_the_run_and_is_no_failure_of_a_cell(kdjax, tmp_path, monkeypatch):
    metrics, measure = tmp_path / "r" / "metrics.jsonl", toy.measure

    def fills_the_disk(config):
        if config.x == 3:
            metrics.rename(tmp_path / "kept")
            metrics.symlink_to("/dev/full")
        return measure(config)

    monkeypatch.setattr(toy, "measure", fills_the_disk)
    status, out, err = kdjax("run", "TOML", "--out", tmp_path / "r")
    assert (status, out) == (2, "")
    said = "cannot be written (No space left on device): make room or give another place"
    assert err == f"kdjax: error: {metrics}: {said}\n"
    assert not (tmp_path / "r" / "summary.json").exists() and not (tmp_path / "r" / "errors.log").exists()
    (tmp_path / "kept").replace(metrics)
    monkeypatch.setattr(toy, "measure", measure)
    status, out, err = kdjax("run", "TOML", "--out", tmp_path / "r")
    assert status == 0 and "2 of 4 cells are there already" in err and "x=4 is 17 high" in out


@pytest.mark.parametrize("name", ["provenance.json.part", "metrics.part", "errors.log", "summary.json.part"])
def test_a_full_disk_is_one_line_whatever_is_written(kdjax, tmp_path, name):
    (tmp_path / "toy.toml").write_text('experiment = "toy"\nx = 1\nfails = [false, true]\n')
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / name).symlink_to("/dev/full")
    status, out, err = kdjax("run", "TOML", "--out", tmp_path / "r")
    assert status == 2 and out == "" and "cannot be written" in err.splitlines()[-1] and "Traceback" not in err
    assert not (tmp_path / "r" / "summary.json").exists()


def test_a_plot_that_cannot_be_written_is_one_line(kdjax, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "plot.part").symlink_to("/dev/full")
    status, _, err = kdjax("run", "TOML", "--out", tmp_path / "r", "--set", "fails=[false,true]", plots=True)
    assert status == 2 and "plot.png: cannot be written (No space left on device)" in err.splitlines()[-1]


def impossible(config):
    raise KdjaxError("x does not go with units: change either" if config.shift == 0 else f"x = {config.x} is odd: no")


def test_what_no_cell_gets_past_is_bad_input(kdjax, tmp_path, monkeypatch):
    monkeypatch.setattr(toy, "measure", impossible)
    status, out, err = kdjax("run", "TOML", "--out", tmp_path / "r")
    assert (status, out, err) == (2, "", "kdjax: error: x does not go with units: change either\n")
    assert not (tmp_path / "r" / "summary.json").exists()
    status, _, err = kdjax("run", "TOML", "--out", tmp_path / "r", "--set", "shift=1")
    assert status == 1 and [line.partition(" failed: ")[2] for line in err.splitlines()] == [
        f"KdjaxError: x = {x} is odd: no" for x in (1, 2, 3, 4)
    ]


def test_a_mistake_of_some_cells_is_told_of_each(kdjax, tmp_path, monkeypatch):
    measure = toy.measure
    monkeypatch.setattr(toy, "measure", lambda config: measure(config) if config.x == 3 else impossible(config))
    status, out, err = kdjax("run", "TOML", "--out", tmp_path / "r")
    said = "failed: KdjaxError: x does not go with units: change either\n"
    assert status == 1 and err == "".join(f"cell x={x} {said}" for x in (1, 2, 4)) and "x=3 is 10 high" in out


def test_a_file_cut_anywhere_gives_the_same_run(kdjax, tmp_path):
    kdjax("run", "TOML", "--out", tmp_path / "whole")
    whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    kdjax("run", "TOML", "--out", tmp_path / "cut")
    for size in random.Random(0).sample(range(len(whole)), 25):
        (tmp_path / "cut" / "metrics.jsonl").write_bytes(whole[:size])
        assert kdjax("run", "TOML", "--out", tmp_path / "cut")[0] == 0
        assert without_timings(tmp_path / "cut") == without_timings(tmp_path / "whole")


def test_a_cell_that_was_cut_short_is_measured_as_a_whole(kdjax, tmp_path):
    kdjax("run", "TOML", "--out", tmp_path / "r")
    metrics = tmp_path / "r" / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2]))
    run = Run(toy, read_sweep(tmp_path / "toy.toml", kind_of=lambda _: toy.Config), tmp_path / "r")
    next(step for step in run.steps() if step == Step("x=1", ended=True))
    assert [record["unit"] for record in Ledger(metrics).cells["x=1"]] == ["u0", "u1", "u2"]


def kill_and_continue(tmp_path, verb, kills):
    """Kills begin after the run has found out where it was, and come at any moment of the work that is left."""
    key = {"run": "experiment", "eval": "evaluation"}[verb]
    x = list(range(1, 2 + kills))
    (tmp_path / "toy.toml").write_text(f'{key} = "toy"\nx = {x}\nunits = 3\npause = 0.1\n')
    command = [sys.executable, "-m", "tests.run.toy_main", verb, str(tmp_path / "toy.toml"), "--no-plots", "--out"]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    chance = random.Random(0)
    for _ in range(kills):
        before = written(metrics)
        victim = subprocess.Popen([*command, str(metrics.parent)], stdout=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while written(metrics) == before and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.6))
        victim.send_signal(signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL  # not at its end: there was work left
    subprocess.run([*command, str(metrics.parent)], check=True, capture_output=True)
    assert without_timings(metrics.parent) == without_timings(tmp_path / "whole")


def written(file):
    return file.exists() and (file.stat().st_ino, file.stat().st_size)


def test_a_killed_run_continues(tmp_path):
    kill_and_continue(tmp_path, "eval", 1)


def test_ctrl_c_keeps_the_finished_cells(tmp_path, foreground):
    (tmp_path / "toy.toml").write_text('experiment = "toy"\nx = [1, 2]\npause = [0.0, 20.0]\n')
    command = [sys.executable, "-m", "tests.run.toy_main", "run", str(tmp_path / "toy.toml"), "--no-plots", "--out"]
    victim = subprocess.Popen([*command, str(tmp_path / "r")], stderr=subprocess.PIPE, text=True)
    metrics, until = tmp_path / "r" / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.3)  # the cell is in the file before the thread that is interrupted hears of it
    victim.send_signal(signal.SIGINT)
    _, err = victim.communicate(timeout=15)  # well before the cell that it is in has ended
    assert victim.returncode == 130 and "the same command continues in" in err
    assert list(Ledger(metrics).cells) == ["x=1 pause=0"]


@pytest.mark.full
@pytest.mark.parametrize("verb", ["run", "eval"])
def test_a_run_killed_ten_times_continues(tmp_path, verb):
    kill_and_continue(tmp_path, verb, 10)


@pytest.mark.parametrize(
    "args, said",
    [
        (["--set", "y=3"], "--set y=3: unknown key 'y' at the top level: choose from x, units, fails, shift, pause"),
        (["--set", "experiment=toi"], "experiment = 'toi' does not exist: did you mean toy?"),
        (["--set", "x=[1,'a']"], "x = 'a': expected `int`"),
    ],
)
def test_bad_input_is_one_line(kdjax, tmp_path, args, said):
    status, _, err = kdjax("run", "TOML", "--out", tmp_path / "r", *args)
    assert status == 2 and said in err and err.count("\n") == 1 and not (tmp_path / "r").exists()


def test_settings_and_provenance_are_not_mixed(kdjax, tmp_path, monkeypatch):
    kdjax("run", "TOML", "--out", tmp_path / "r", "--set", "fails=[false,true]")
    status, _, err = kdjax("run", "TOML", "--out", tmp_path / "r", "--set", "x=5")
    assert status == 2 and "is of a run with other settings" in err

    def refuse(config):
        raise KdjaxError("no such file")

    with monkeypatch.context() as broken:  # no other folder would help
        broken.setattr(toy, "inputs", refuse)
        status, _, err = kdjax("run", "TOML", "--out", tmp_path / "r", "--set", "x=5")
    assert status == 2 and err == "kdjax: error: no such file\n"
    record = read(tmp_path / "r", "provenance.json")
    record["versions"]["jax"] = "0.0"
    (tmp_path / "r" / "provenance.json").write_text(json.dumps(record))
    status, _, err = kdjax("run", "TOML", "--out", tmp_path / "r", "--set", "fails=[false,true]")
    assert status == 2 and "was measured with another versions.jax" in err


def test_a_folder_stands_for_the_experiments_in_it(kdjax, tmp_path):
    (tmp_path / "second.toml").write_text('experiment = "toy"\nx = 7\n')
    (tmp_path / "other.toml").write_text("model = 1\n")
    assert kdjax("run", tmp_path, "--smoke", "--out", tmp_path / "all")[0] == 0
    assert {f.name for f in (tmp_path / "all").iterdir()} == {"toy-smoke", "second-smoke"}
    (tmp_path / "all" / "second-smoke" / "config.toml").write_text("x = 1\n")
    (tmp_path / "all" / "toy-smoke" / "summary.json").unlink()
    status, _, err = kdjax("run", tmp_path, "--smoke", "--out", tmp_path / "all")
    assert status == 2 and "second-smoke/config.toml is of a run with other settings" in err
    assert (tmp_path / "all" / "toy-smoke" / "summary.json").exists()
    (tmp_path / "empty").mkdir()
    status, _, err = kdjax("run", tmp_path / "empty")
    assert status == 2 and "has no TOML file with experiment = NAME" in err


def test_without_matplotlib_nothing_is_measured(kdjax, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = kdjax("run", "TOML", "--out", tmp_path / "r", plots=True)
    assert status == 2 and 'pip install "kdjax[plots]"' in err and not (tmp_path / "r").exists()
    with pytest.raises(ValueError, match="--no-plots"):
        plot.require()
    assert kdjax("run", "TOML", "--out", tmp_path / "r")[0] == 0


def test_compare_names_what_only_one_run_sets(kdjax, tmp_path):
    kdjax("run", "TOML", "--out", tmp_path / "a")
    (tmp_path / "toy.toml").write_text('experiment = "toy"\nunits = 3\n[[cells]]\nx = [1, 2]\n[[cells]]\nx = 9\n')
    kdjax("run", "TOML", "--out", tmp_path / "b")
    found = json.loads(kdjax("compare", tmp_path / "a", tmp_path / "b", "--json")[1])["settings"]
    cells = [{"x": [1, 2]}, {"x": 9}]
    assert found == {"x": {"a": [1, 2, 3, 4], "b": None}, "cells": {"a": None, "b": cells}}
    said = kdjax("compare", tmp_path / "a", tmp_path / "b")[1]
    assert '  cells: not set -> [{"x": [1, 2]}, {"x": 9}]\n' in said and said.index("cells:") < said.index(" metric ")


def test_compare_lists_what_the_devices_chose(kdjax, tmp_path):
    for name in "ab":
        kdjax("run", "TOML", "--out", tmp_path / name)
    chosen = {"a": {"runtime.backend": "xla", "x": 7}, "b": {"runtime.backend": ["xla", "triton"], "x": 8}}
    for name, settled in chosen.items():
        record = read(tmp_path / name, "provenance.json")
        assert record["settled"] == {}
        (tmp_path / name / "provenance.json").write_text(json.dumps(record | {"settled": settled}))
    found = json.loads(kdjax("compare", tmp_path / "a", tmp_path / "b", "--json")[1])
    # x is set by both configs
    assert found["settings"] == {"runtime.backend": {"a": "xla", "b": ["xla", "triton"]}} and not found["provenance"]
    del record["settled"]  # a run of before
    (tmp_path / "b" / "provenance.json").write_text(json.dumps(record))
    assert json.loads(kdjax("compare", tmp_path / "a", tmp_path / "b", "--json")[1])["settings"] == {}


def test_compare_gives_paired_differences(kdjax, tmp_path):
    for name, shift in (("a", 0), ("b", 0.5), ("c", 0)):
        kdjax("run", "TOML", "--out", tmp_path / name, "--set", f"shift={shift}")
    status, out, _ = kdjax("compare", tmp_path / "a", tmp_path / "b", "--json")
    rows = json.loads(out)["differences"]
    height = next(r for r in rows if (r["cell_a"], r["metric"]) == ("x=1", "height"))
    assert status == 0 and height["paired"] and height["n"] == 3 and height["significant"]
    assert [height[k] for k in ("difference", "low", "high", "change")] == pytest.approx([0.5, 0.5, 0.5, 0.25])
    assert json.loads(out)["settings"] == {"shift": {"a": 0, "b": 0.5}}
    assert kdjax("compare", tmp_path / "a", tmp_path / "b")[1].startswith(
        "settings that differ, A -> B:\n  shift: 0 -> 0.5\n"
    )
    rows = json.loads(kdjax("compare", tmp_path / "a", tmp_path / "c", "--json")[1])["differences"]
    assert not any(r["significant"] for r in rows if r["metric"] == "height")
    out = kdjax("compare", tmp_path / "a", tmp_path / "a", "--cells", "x=1", "x=2")[1]
    assert "x=1 | x=2" in out and "+3 [+3, +3] * " in out
    out = kdjax("compare", tmp_path / "a", tmp_path / "c")[1]
    assert "+0 [+0, +0]" in out and "+0 [+0, +0] *" not in out and "settings" not in out
    assert "did you mean x=1?" in kdjax("compare", tmp_path / "a", tmp_path / "a", "--cells", "x=11", "x=2")[2]
    status, _, err = kdjax("compare", tmp_path, tmp_path / "a")
    assert status == 2 and "holds no finished run" in err


def test_compare_says_what_else_the_runs_differ_in(kdjax, tmp_path, monkeypatch):
    kdjax("run", "TOML", "--out", tmp_path / "a", "--set", "x=[1,2]")
    rate = msgspec.structs.replace(toy.METRICS["rate"], per="y")  # another figure under the same name
    monkeypatch.setitem(toy.METRICS, "rate", rate)
    kdjax("run", "TOML", "--out", tmp_path / "b", "--set", "x=[2,3]")
    record = read(tmp_path / "b", "provenance.json")
    (tmp_path / "b" / "provenance.json").write_text(json.dumps(record | {"devices": ["cuda:H200"]}))
    found = json.loads(kdjax("compare", tmp_path / "a", tmp_path / "b", "--json")[1])
    assert (found["only_a"], found["only_b"], found["provenance"]) == (["x=1"], ["x=3"], ["devices"])
    assert [(row["cell_a"], row["metric"]) for row in found["differences"]] == [("x=2", "height"), ("x=2", "seconds")]
