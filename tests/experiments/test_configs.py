"""Every experiment of configs/experiments runs at its smoke size, on a random model, and can be summed up."""

import importlib.util
import json
import pathlib
import tomllib

import pytest

import experiments
from kdjax import cli
from kdjax.cli.run import find
from kdjax.config.sweep import read_sweep
from tests.cli.conftest import cache as cache
from tests.cli.conftest import tiny as tiny

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "experiments"
NAMED = {f.stem: data for f in sorted(CONFIGS.glob("*.toml")) if "experiment" in (data := tomllib.loads(f.read_text()))}
PLOTS = importlib.util.find_spec("matplotlib") is not None


def test_every_experiment_has_a_config():
    assert {data["experiment"] for data in NAMED.values()} == set(experiments.EXPERIMENTS)


@pytest.mark.parametrize("name", NAMED)
def test_smoke(name, tiny, cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KDJAX_CACHE_DIR", str(cache))
    sweep = read_sweep(CONFIGS / f"{name}.toml", kind_of=lambda n: find(n).Config, smoke=True)
    models = (f"--set=model.target={tiny / 'target'}", f"--set=model.drafter={tiny / 'drafter'}")
    settings = models if hasattr(sweep.cells[0].config, "model") else ()
    if name == "drafter_precision":
        settings += ("--set=group_size=16",)  # the widths of the random model are multiples of no more
    if not PLOTS:
        settings += ("--no-plots",)
    status = cli.main(["run", str(CONFIGS / f"{name}.toml"), "--smoke", "--out", str(tmp_path / "r"), *settings])
    out, err = capsys.readouterr()
    assert status == 0, err
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert list(summary["cells"]) == [cell.name for cell in sweep.cells] and not summary["failed"]
    assert summary["findings"] and all(finding in " ".join(out.split()) for finding in summary["findings"])
    if PLOTS:
        assert (tmp_path / "r" / "plot.png").stat().st_size > 5000
