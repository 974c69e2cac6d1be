"""`kdjax bench ttft` on a CPU device, at a hundredth of the size."""

import json
import pathlib

import pytest

from kdjax.cli import main

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SUBJECT = [str(CONFIGS / "models" / "kimi-k2.6.toml"), "--rank-of", str(CONFIGS / "meshes" / "h200x8.toml"), "--smoke"]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    monkeypatch.setattr("kdjax.cli.bench.configure_jax", lambda **_: None)


def test_prompts_are_read_chunk_by_chunk(tmp_path, capsys):
    out = tmp_path / "ttft.json"
    assert main(["bench", "ttft", *SUBJECT, "--prompts", "300", "100", "--chunk", "64", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["subject"] == "one rank's share of 8 devices, alone"
    assert [(row["prompt"], row["chunk"]) for row in found["rows"]] == [(100, 64), (300, 64)]
    for row in found["rows"]:
        chunks = -(-row["prompt"] // 64)
        assert row["longest_chunk_ms"] <= row["time_to_first_token_ms"] <= chunks * row["longest_chunk_ms"] + 0.01
    assert "300 tokens: first token after" in capsys.readouterr().err


def test_a_prompt_beyond_the_model_is_refused(tmp_path, capsys):
    assert main(["bench", "ttft", *SUBJECT, "--prompts", "9999999", "--out", str(tmp_path / "x.json")]) == 2
    assert "--prompts 9999999 exceeds the model's max_position_embeddings=" in capsys.readouterr().err
