"""A mesh beside one of its devices: the same model on both, and what is said where they differ."""

import json
import pathlib

import jax
import numpy as np
import pytest

from kdjax.bench import equality
from kdjax.bench.subject import Subject, hundredth
from kdjax.cli import main
from kdjax.config import MeshConfig, ModelPair, load
from kdjax.decode.loop import Report
from kdjax.errors import KdjaxError
from kdjax.plan import Workload

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
K26 = str(CONFIGS / "models" / "kimi-k2.6.toml")


def test_a_mesh_computes_what_one_device_does(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kdjax.cli.bench.configure_jax", lambda **_: None)
    (tmp_path / "two.toml").write_text("[mesh]\ntensor = 2\n")
    out = tmp_path / "equal.json"
    argv = ["--mesh", str(tmp_path / "two.toml"), "--out", str(out), "--tokens", "2x3", "--rounds", "3"]
    argv += ["--smoke", "--context", "32", "--dtype", "float32"]
    assert main(["bench", "equal", K26, *argv]) == 0
    assert "2x3 tokens: logits differ by " in capsys.readouterr().err
    found = json.loads(out.read_text())
    assert (found["dtype"], found["layers"], found["mesh"]["tensor"]) == ("float32", 2, 2)
    (row,) = found["rows"]
    assert (row["tokens"], row["streams"], row["rows"], row["choices"]) == (6, 2, 6, 6)
    assert row["logits_relative_difference"] < 1e-5
    assert row["top1_same"] == row["rows_of_the_same_experts"] == row["same_choices"] == 6
    assert (
        row["rounds"] == [3, 3] and row["emitted"][0] == row["emitted"][1] and row["same_emitted"] == row["emitted"][0]
    )
    assert row["accepted_by_depth"][0] == row["accepted_by_depth"][1]


def test_rows_that_chose_other_experts_are_counted_apart():
    expected = np.eye(3, 4, dtype=np.float32)[None]  # [slots, rows, vocab]
    found = expected.copy()
    found[0, 1] = [0.0, 0.9, 1.0, 0.0]
    experts = np.zeros((2, 1, 3, 2), np.int32)
    other = experts.copy()
    other[1, 0, 1, 0] = 5
    said = equality._forwards((expected, experts), (found, other))
    assert (said["rows"], said["rows_of_the_same_experts"], said["choices"], said["same_choices"]) == (3, 2, 6, 5)
    assert said["logits_relative_difference"] == pytest.approx((1.01 / 3) ** 0.5)
    assert said["logits_relative_difference_same_experts"] == 0.0
    assert said["top1_same"] == 2
    assert said["top1_margins_where_not"] == [pytest.approx([1.0, 0.1])]


def test_tokens_count_until_the_first_that_differs():
    emitted, reason, depths = np.array([3, 3]), np.zeros(2, np.int32), np.array([[1, 0], [2, 1]])
    one = Report(np.array([[1, 2, 3, 0], [4, 5, 6, 0]]), emitted, reason, np.array([2, 2]), depths)
    mesh = one._replace(output=np.array([[1, 2, 3, 9], [4, 7, 6, 0]]), emitted=np.array([3, 2]))
    assert equality._rounds(one, mesh) == {
        "rounds": [2, 2],
        "emitted": [[3, 3], [3, 2]],
        "same_emitted": [3, 1],
        "accepted_by_depth": [[3, 1], [3, 1]],
    }


def test_caches_are_not_filled():
    pair = hundredth(load(ModelPair, CONFIGS / "models" / "kimi-k2.6.toml"))
    subject = Subject.of(pair, MeshConfig(tensor=2), "xla", jax.devices(), rank=False)
    with pytest.raises(KdjaxError, match="--rounds 65 could fill the caches: at most 64 of 4 tokens"):
        equality.compare(subject, Workload(32, 1, 3), 65)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "compares a mesh with one of its devices: give --mesh FILE"),
        (["--mesh", "one.toml"], "one.toml is a mesh of one device: there is nothing to compare"),
    ],
)
def test_a_mesh_is_needed(argv, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kdjax.cli.bench.configure_jax", lambda **_: None)
    monkeypatch.chdir(tmp_path)
    pathlib.Path("one.toml").write_text("[mesh]\ntensor = 1\n")
    assert main(["bench", "equal", K26, "--smoke", "--out", "x.json", *argv]) == 2
    assert said in capsys.readouterr().err
