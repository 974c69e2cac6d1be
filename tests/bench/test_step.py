"""`kdjax bench step` on CPU devices, at a hundredth of the size."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from kdjax.bench import step
from kdjax.cli import main
from kdjax.errors import KdjaxError

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
K26 = str(CONFIGS / "models" / "kimi-k2.6.toml")
H200X8 = str(CONFIGS / "meshes" / "h200x8.toml")
CPU = ["--smoke", "--context", "64", "--threads", "2"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KDJAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("kdjax.cli.bench.configure_jax", lambda **_: None)


def bench(out, *argv):
    assert main(["bench", "step", K26, "--out", str(out), *CPU, *argv]) == 0
    return json.loads(out.read_text())


def test_a_rank_is_measured_in_several_runs(tmp_path, capsys):
    out = tmp_path / "step.json"
    found = bench(out, "--rank-of", H200X8, "--tokens", "1", "--parts", "stages")
    assert found["subject"] == "one rank's share of 8 devices, alone" and found["layers"] == 2
    (row,) = found["rows"]
    assert (row["tokens"], row["distinct_experts_per_layer"], row["distinct_experts_are"]) == (1, 2.0, "expected")
    assert row["stages_ms"].keys() == {"accept", "commit"} and "round_ms" not in row
    found = bench(out, "--rank-of", H200X8, "--tokens", "2x2")
    assert [row["tokens"] for row in found["rows"]] == [1, 4]
    row = found["rows"][1]
    assert (row["streams"], row["budget"], row["context"]) == (2, 1, 64)
    assert row.keys() >= {"verify_ms", "floor_ms", "round_ms", "verify_over_floor", "round_over_verify"}
    assert row["stages_ms"].keys() == {"draft", "tree", "verify", "accept", "commit"}
    parts = row["verify_components_ms"]
    assert parts.keys() == {"attention", "projections", "experts", "shared_dense", "lm_head", "other"}
    assert sum(parts.values()) == pytest.approx(row["verify_ms"], abs=0.001)
    # One of the two layers is a MoE: of its experts, those that were chosen.
    needed = row["needed_bytes"]
    per_expert = 3 * 128 * 128 * 4.5 / 8
    assert 2 <= row["distinct_experts_per_layer"] <= 8
    assert needed["routed_experts"] == row["distinct_experts_per_layer"] * per_expert
    drafted = needed["drafter"] + needed["lm_head_again"] + needed["drafter_cache"]
    assert needed["round"] == needed["verify"] + drafted
    assert row["floor_ms"] / row["round_floor_ms"] == pytest.approx(needed["verify"] / needed["round"], rel=0.001)
    total = row["round_ms"] + row["all_reduce_ms"]
    assert row["tokens_per_s"]["4.5"] == pytest.approx(1e3 * 2 * 4.5 / total, rel=0.01)
    err = capsys.readouterr().err
    assert "2x2 tokens: round " in err and "2x2 tokens: lm_head " in err
    other = ["--mesh", str(CONFIGS / "meshes" / "cpu8.toml"), "--tokens", "1"]
    assert main(["bench", "step", K26, "--out", str(out), *CPU, *other]) == 2
    assert "was measured with another subject, mesh: give another --out" in capsys.readouterr().err


def test_a_later_run_adds_to_a_row_and_loses_nothing(tmp_path):
    out = tmp_path / "step.json"
    argv = ["--rank-of", H200X8, "--tokens", "1", "--layers", "1", "--parts"]
    (first,) = bench(out, *argv, "verify")["rows"]
    (second,) = bench(out, *argv, "round")["rows"]
    differences = {"round_over_verify": round(second["round_ms"] / first["verify_ms"], 3)}
    assert second.keys() - first.keys() >= {"round_ms", "tokens_per_s", "round_program", *differences}
    assert second == second | first | differences


def test_differences_are_of_the_latest_values():
    floor = {name: 1.0 for name in step.FLOOR}
    key = {"context": 64, "tokens": 8, "streams": 1}
    parts = {"attention": 0.5, "lm_head": 1.5}
    old = {**key, **floor, "verify_ms": 4.0, "verify_over_floor": 4.0, "stages_ms": {"verify": 4.0, "tree": 0.5}}
    old |= {"verify_components_ms": {**parts, "other": 2.0}, "idle": [], "distinct_experts_are": "measured"}
    other = {**key, "context": 128, "stages_ms": {}}
    new = {**key, **{name: 2.0 for name in step.FLOOR}, "round_ms": 7.0, "verify_components_ms": {}}
    new |= {"stages_ms": {"accept": 0.25, "commit": 0.5}, "distinct_experts_are": "expected"}
    row, kept = step.merged([other, old], [new, {}])
    assert kept == other
    assert row == old | {
        "round_ms": 7.0,
        "round_over_verify": 1.75,
        "stages_ms": {"verify": 4.0, "tree": 0.5, "accept": 0.25, "commit": 0.5},
        "round_less_stages_ms": 1.75,
    }
    again = {**key, **{name: 3.0 for name in step.FLOOR}, "verify_ms": 5.0, "verify_over_floor": 1.667}
    again |= {"stages_ms": {"verify": 5.0}, "verify_components_ms": {}}
    assert step.merged([row], [again]) == [
        row
        | again
        | {
            "round_over_verify": 1.4,
            "stages_ms": row["stages_ms"] | {"verify": 5.0},
            "round_less_stages_ms": 0.75,
            "verify_components_ms": {**parts, "other": 3.0},
        }
    ]


@pytest.mark.parametrize("header", [{"subject": "a rank"}, {"device": "H200"}])
def test_results_of_something_else_are_refused(header, tmp_path):
    out = tmp_path / "step.json"
    step.timing.write_rows(out, [], subject="the whole model", device="cpu")
    assert step.kept_rows(out, {"subject": "the whole model", "device": "cpu"}) == []
    with pytest.raises(KdjaxError, match=f"was measured with another {next(iter(header))}: give another --out"):
        step.kept_rows(out, {"subject": "the whole model", "device": "cpu"} | header)
    for text in ("{", "[]", "{}"):
        out.write_text(text)
        with pytest.raises(KdjaxError, match="is not a result of kdjax bench step: give another --out"):
            step.kept_rows(out, header)


def test_a_mesh_is_measured_with_and_without_its_exchanges(tmp_path, capsys):
    (tmp_path / "two.toml").write_text(
        '[mesh]\ntensor = 2\n[device]\nkind = "x"\nmemory_gb = 1\nread_gb_per_s = 1\n'
        "all_reduce_us = 2\nall_reduce_gb_per_s = 0.256\n"
    )
    mesh = ["--mesh", str(tmp_path / "two.toml"), "--tokens", "1", "--layers", "1", "--parts", "exchanges"]
    (row,) = bench(tmp_path / "step.json", *mesh)["rows"]
    found = row["exchanges"]
    assert (found["all_reduces"], found["message_bytes"], found["predicted_us"]) == (3, 256, 3.0)
    each = (row["verify_ms"] - found["verify_without_ms"]) / 3 * 1e3
    assert found["in_verify_us"] == pytest.approx(each, abs=0.1) and "chained_us" in found
    err = capsys.readouterr().err
    for name in ("verify", "exchanges", "between exchanges", "verify without exchanges"):
        assert f"1x1 tokens: {name} " in err
    alone = ["--rank-of", str(tmp_path / "two.toml"), *mesh[2:]]
    assert "exchanges" not in bench(tmp_path / "rank.json", *alone, "verify")["rows"][0]


@pytest.mark.full
def test_a_mesh_runs_its_exchanges(tmp_path):
    (tmp_path / "two.toml").write_text("[mesh]\ntensor = 2\n")
    mesh = ["--mesh", str(tmp_path / "two.toml")]
    found = bench(tmp_path / "step.json", *mesh, "--tokens", "1", "--parts", "round")
    assert found["subject"] == "the whole model"
    (row,) = found["rows"]
    assert row["round_program"]["collectives"]["all-reduce"] == 5  # embedding, and two per layer
    assert row["all_reduce_ms"] is None and row["distinct_experts_are"] == "expected"


def test_the_read_ceiling_of_a_cpu_leaves_room_on_a_laptop(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(step, "measure", lambda *args: given.append(args[3]) or ())
    assert main(["bench", "step", str(CONFIGS / "models" / "nano.toml"), "--out", str(tmp_path / "x.json")]) == 0
    assert given[0].ceiling_bytes == 2**28 < step.Settings(()).ceiling_bytes


def test_a_program_that_calls_the_host_is_found():
    def calls(x):
        jax.debug.callback(lambda _: None, x)
        return x + 1

    def text(f):
        return jax.jit(f).lower(jnp.ones(4)).compile().as_text()

    assert step.host_exchanges(text(calls)) and not step.host_exchanges(text(lambda x: x + 1))
    assert step.host_exchanges("  %i = ((f32[3]), token[]) infeed(%token)") == ["infeed"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tokens", "65"], "expected tokens such as 8, or STREAMSxTOKENS such as 10x8, above 64 a multiple of 8"),
        (["--tokens", "x8"], "not 'x8'"),
        (["--parts", "trace"], "--parts trace needs a folder: give --trace DIR"),
        (["--rank-of", str(CONFIGS / "meshes" / "h200x8-long.toml")], "a rank attends with the others, not alone"),
        (["--rank-of", H200X8, "--mesh", H200X8], "not allowed with argument"),
    ],
)
def test_mistakes_are_one_line(argv, said, tmp_path, capsys):
    assert main(["bench", "step", K26, "--smoke", "--out", str(tmp_path / "x.json"), *argv]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_benches_of_kernels_take_their_own_options(tmp_path, capsys):
    assert main(["bench", "attention", "--out", str(tmp_path / "x.json")]) == 2
    assert "kdjax bench attention measures a GPU and JAX sees only cpu: run it there\n" in capsys.readouterr().err
    for backend in ([], ["--backend=triton"]):
        assert main(["bench", "tree", *backend, "--out", str(tmp_path / "x.json")]) == 2
        said = "kdjax bench tree measures a GPU and JAX sees only cpu: run it there, or give --backend xla or interpret"
        assert said in capsys.readouterr().err
    assert main(["bench", "prefill", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--tune" in said and said.startswith("usage: kdjax bench prefill ")
    shape = ["--shape", "2", "128", "1", "--widths", "128", "--tokens", "1", "--repetitions", "1"]
    argv = ["--backend", "interpret", *shape, "--out", str(tmp_path / "moe.json")]
    assert main(["bench", "moe", *argv]) == 0
    assert json.loads((tmp_path / "moe.json").read_text())["rows"][0]["tokens"] == 1
