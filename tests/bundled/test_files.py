"""The shipped files: small enough, part of every wheel, and complete."""

import json
import pathlib
import subprocess
import tomllib

import numpy as np
import pytest

from experiments.nano.config import NanoConfig
from experiments.nano.evaluate import GROUPS
from experiments.nano.tables import markdown
from kdjax.checkpoint import sha256
from kdjax.config import ModelPair, load
from kdjax.evaluate.divergence import ROUNDING
from kdjax.tokenizer.chat import ChatTemplate
from tests.bundled.conftest import NANO

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 16_000_000


def test_all_files_together_fit_the_limit():
    assert sum(p.stat().st_size for p in NANO.rglob("*") if p.is_file()) <= LIMIT


def test_a_wheel_holds_them():
    """The build backend takes whole packages, minus what its settings or .gitignore exclude."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert list(build) == ["targets"] and set(build["targets"]["wheel"]) == {"packages"}
    assert "kdjax" in build["targets"]["wheel"]["packages"]
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    files = [str(p.relative_to(ROOT)) for p in NANO.rglob("*") if p.is_file()]
    assert len(files) >= 9
    ignored = subprocess.run(["git", "check-ignore", "--no-index", *files], cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout == ""
    tracked = subprocess.run(["git", "ls-files", *files], cwd=ROOT, capture_output=True, text=True, check=True)
    assert sorted(tracked.stdout.split()) == sorted(files)


def test_tokenizer_and_models_agree(target, drafter, tokenizer):
    assert tokenizer.vocab_size == target.config.vocab_size == drafter.config.vocab_size
    assert tokenizer.prompt_prefix == (tokenizer.eos_id,)
    assert tokenizer.stop_token_ids <= set(target.config.eos_token_ids)


def test_configs_are_those_of_training_and_of_the_model_file(target, drafter):
    trained = load(NanoConfig, ROOT / "configs/experiments/nano.toml")
    assert target.config == trained.target
    assert drafter.config == trained.drafter
    pair = load(ModelPair, ROOT / "configs/models/nano.toml")
    assert (target.config, drafter.config) == (pair.target, pair.drafter)


def test_template_is_the_one_of_the_package(tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert tokenizer.template.render(messages) == ChatTemplate.default().render(messages)


def test_no_weight_is_degenerate(reference_target, reference_drafter):
    """An expert or a head that is all zero or not finite would mean a broken export."""

    def leaves(tree):
        for value in tree.values():
            yield from leaves(value) if isinstance(value, dict) else [value]

    for leaf in [*leaves(reference_target), *leaves(reference_drafter)]:
        assert np.isfinite(leaf).all()
        assert leaf.any(axis=tuple(range(1, leaf.ndim)) or None).all() or leaf.shape[0] == 4096


@pytest.fixture(scope="module")
def results():
    return json.loads((ROOT / "docs/results/bundled_nano.json").read_text())


def test_results_are_of_these_weights(results):
    assert results["sha256"] == {role: sha256(NANO / role) for role in ("target", "drafter")}
    assert all(parting["gap"] < ROUNDING for parting in results["partings"])
    assert len(results["partings"]) < 0.01 * results["outputs"]


def test_card_shows_the_results(results):
    config = load(NanoConfig, ROOT / "configs/experiments/nano.toml")
    cells = [cell for cell in config.evaluate.cells if cell.name in results["acceptance"]]
    assert len(cells) == len(results["acceptance"])
    assert markdown(results, cells, list(GROUPS)) in (NANO / "README.md").read_text()


def test_results_reach_the_bars(results):
    """Bits per byte, and tau at T = 0 with looping outputs excluded."""
    bits = {name: entry["model"] for name, entry in results["bits_per_byte"].items()}
    sizes = {name: entry["bytes"] for name, entry in results["bits_per_byte"].items()}
    code = ("py_stdlib", "py_networkx")
    assert sum(bits[d] * sizes[d] for d in code) / sum(sizes[d] for d in code) < 1.05
    assert bits["doc_python_rst"] < 1.35 and bits["doc_sqlite"] < 1.35
    for cell, python, prose in (("chain-7-T0", 2.8, 2.0), ("tree-15-T0", 3.3, 2.4)):
        entries = results["acceptance"][cell]
        assert entries["python"]["without_loops"]["tau_micro"] >= python
        assert entries["prose"]["without_loops"]["tau_micro"] >= prose
