"""`kdjax synth` and `kdjax quantize`: what they write runs."""

import json
import pathlib

import pytest

from kdjax.cli import main

ROOT = pathlib.Path(__file__).parents[2]
NANO = str(ROOT / "configs" / "models" / "nano.toml")


def test_a_synthetic_pair_is_quantised_and_generates(tmp_path, capsys, cache, monkeypatch):
    monkeypatch.setenv("KDJAX_CACHE_DIR", str(cache))
    experts = ["--set", "target.n_routed_experts=4", "--set", "target.num_experts_per_tok=2"]
    size = ["--layers", "2", *experts, "--set", "drafter.num_hidden_layers=1"]
    size += ["--set", 'drafter.layer_types=["full_attention"]']
    assert main(["synth", NANO, "--out", str(tmp_path), "--dense", *size]) == 0
    assert main(["quantize", str(tmp_path / "target"), "--out", str(tmp_path / "int4"), "--scale", "max/7"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"{tmp_path}/target: 2 layers, 0.0") and out[1].startswith(f"{tmp_path}/drafter: 1 layers")
    assert out[2].startswith(f"{tmp_path}/int4: 12 expert matrices in INT4, ")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json.part").symlink_to("/dev/full")
    assert main(["quantize", str(tmp_path / "target"), "--out", str(tmp_path / "full")]) == 2
    assert "full/config.json: cannot be written (No space left on device): make room" in capsys.readouterr().err
    model = ["--model", str(tmp_path / "int4"), "--mode", "autoregressive"]
    assert main(["generate", *model, "--json", "-n", "8", "x"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["new_tokens"] == 8 and len(set(result["streams"][0]["token_ids"])) > 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["synth", NANO], "the following arguments are required: --out"),
        (
            ["synth", NANO, "--out", "x", "--layers", "0"],
            "--layers: expected an integer of at least 1, not '0'",
        ),
        (["synth", NANO, "--out", "x", "--layers", "9"], "the model has 7 layers, not 9"),
        (["synth", NANO, "--out", "x", "--set", "target.layers=1"], "unknown key 'layers' in [target]"),
        (["synth", "nowhere.toml", "--out", "x"], "nowhere.toml: no such config file"),
        (["quantize", "nowhere", "--out", "x"], "nowhere/config.json does not exist"),
        (["quantize", ".", "--out", "x", "--scale", "max/8"], "argument --scale: invalid choice: 'max/8'"),
    ],
)
def test_mistakes_are_one_line(capsys, argv, said):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err


def test_a_model_that_does_not_fit_on_the_disk_is_refused(capsys, tmp_path):
    huge = [text for role in ("target", "drafter") for text in ("--set", f"{role}.vocab_size=1000000000000")]
    assert main(["synth", NANO, "--out", str(tmp_path), *huge]) == 2
    assert "GB free: give another folder or make room" in capsys.readouterr().err
    assert not list((tmp_path / "target").iterdir())
