"""The configs of the benchmarks, which read the miniatures at their smoke sizes."""

import json
import pathlib

import pytest

from kdjax import cli
from kdjax.cli.eval import find
from kdjax.config.sweep import read_sweep
from kdjax.evaluate import BENCHMARKS
from tests.cli.conftest import cache as cache
from tests.cli.conftest import tiny as tiny

CONFIGS = pathlib.Path(__file__).parents[3] / "configs" / "evals"


def sweep(name, *overrides, smoke):
    kind_of = lambda n: find(n).Config  # noqa: E731
    return read_sweep(CONFIGS / f"{name}.toml", overrides, kind_of=kind_of, key="evaluation", smoke=smoke)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_config(name, monkeypatch):
    monkeypatch.chdir(CONFIGS.parents[1])
    assert all(cell.config.path == "" for cell in sweep(name, smoke=False).cells)
    small = sweep(name, smoke=True)
    assert small.name == name and len({cell.name for cell in small.cells}) == len(small.cells)
    for cell in small.cells:
        assert find(name).inputs(cell.config).files[name].is_file()
        assert find(name).units(cell.config)


def test_code_is_run_only_where_that_is_allowed(capsys, tmp_path):
    file = CONFIGS.parents[1] / "tests" / "data" / "evals" / "humaneval.jsonl"
    out = str(tmp_path / "r")
    status = cli.main(["eval", str(CONFIGS / "humaneval.toml"), f"--set=path={file}", "--no-plots", "--out", out])
    said = capsys.readouterr().err.strip().splitlines()
    assert status == 2 and said[-1].startswith("kdjax: error: allow_code_execution = false: this benchmark runs")


@pytest.mark.full
@pytest.mark.parametrize("name", BENCHMARKS)
def test_smoke(name, tiny, cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KDJAX_CACHE_DIR", str(cache))
    monkeypatch.chdir(CONFIGS.parents[1])
    models = (f"--set=model.target={tiny / 'target'}", f"--set=model.drafter={tiny / 'drafter'}")
    file, out = CONFIGS / f"{name}.toml", tmp_path / "r"
    status = cli.main(["eval", str(file), "--smoke", "--no-plots", "--out", str(out), *models])
    said, err = capsys.readouterr()
    assert status == 0, err
    summary = json.loads((out / "summary.json").read_text())
    assert not summary["failed"] and all(finding in " ".join(said.split()) for finding in summary["findings"])
    files = json.loads((out / "provenance.json").read_text())["files"]
    assert len(files[name]["sha256"]) == 64
