"""Figures of K2.6 against byte counts worked out by hand from its published tensors."""

import json
import pathlib
import re

import msgspec
import pytest

from kdjax.cli import main
from kdjax.config import Cluster, DeviceConfig, MeshConfig, ModelPair, load
from kdjax.errors import KdjaxError
from kdjax.plan import Workload, memory, plan, step
from kdjax.plan.step import busiest, distinct_experts

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
K26 = load(ModelPair, CONFIGS / "models" / "kimi-k2.6.toml")
H200X8 = load(Cluster, CONFIGS / "meshes" / "h200x8.toml")
TP8, EP8, ONE = MeshConfig(tensor=8), MeshConfig(expert=8), MeshConfig()


def test_one_device_holds_the_published_bytes():
    held = memory(K26, ONE, Workload(context=1024, streams=1, budget=7))
    shapes = 60 * 384 * 3 * 2 * 4  # the int32 weight_shape of every INT4 matrix stays in the file
    assert sum(held.target.values()) == 594_205_904_896 - shapes
    assert held.target["routed_experts"] == 60 * 9_512_681_472
    assert held.target["attention"] + held.target["norms"] == 61 * (202_248_192 + 2 * 2 * 7168) + 2 * 7168
    assert sum(held.drafter.values()) == 6_958_554_112


@pytest.mark.parametrize("mesh", [TP8, EP8], ids=["tp8", "ep8"])
def test_an_eighth_of_the_model_and_what_is_whole_everywhere(mesh):
    held = memory(K26, mesh, Workload(context=262_144, streams=1, budget=7))
    assert sum(held.target.values()) == pytest.approx(76.2e9, rel=0.001)
    assert sum(held.drafter.values()) == pytest.approx(0.87e9, rel=0.001)
    assert held.kv_cache == 70_272 * (262_144 + 8) + 4  # whole on every device, one int32 length
    assert held.drafter_cache == 24_576 * 262_144 // 8
    assert 0 < held.workspace < 1e8


def test_a_sequence_axis_shares_the_cache():
    whole, shared = (
        memory(K26, mesh, Workload(context=65_536 - 64, streams=2, budget=63)).kv_cache
        for mesh in (TP8, MeshConfig(sequence=8))
    )
    assert shared == pytest.approx(whole / 8, rel=1e-6)


@pytest.mark.parametrize(("tokens", "gigabytes"), [(1, 6.03), (9, 16.86), (17, 26.01), (33, 40.27)])
def test_a_step_reads_what_its_tokens_need(tokens, gigabytes):
    workload = Workload(context=4096, streams=1, budget=tokens - 1)
    reads = step(K26, TP8, workload, memory(K26, TP8, workload)).reads
    assert reads.pop("kv_cache") == 70_272 * 4096
    if tokens > 1:
        assert reads.pop("drafter") == pytest.approx(0.87e9, rel=0.001)
        assert reads.pop("lm_head_again") == reads["lm_head"] == 2_348_810_240 // 8
        assert reads.pop("drafter_cache") == 4096 // 8 * (5 * 2048 + 4096)
    assert sum(reads.values()) == pytest.approx(gigabytes * 1e9, rel=0.001)


@pytest.mark.parametrize(("tokens", "distinct", "most"), [(1, 8.0, 2.55), (9, 66.28, 12.1), (33, 192.31, 29.0)])
def test_experts_of_a_step(tokens, distinct, most):
    assert distinct_experts(K26.target, tokens) == pytest.approx(distinct, abs=0.01)
    assert busiest(K26.target, tokens, 8) == pytest.approx(most, rel=0.03)
    assert busiest(K26.target, tokens, 1) == pytest.approx(distinct, rel=0.02)


def test_times_follow_from_bytes_and_rates():
    device = DeviceConfig(kind="x", memory_gb=100, read_gb_per_s=1000, all_reduce_us=10, all_reduce_gb_per_s=100)
    workload = Workload(context=4096, streams=2, budget=7)
    found = plan(K26, Cluster(mesh=TP8, device=device), workload)
    assert found.floor_ms == pytest.approx(found.step.bytes / 1e9)
    verify, draft = 123 * (0.01 + 16 * 7168 * 2 / 100e6), 13 * (0.01 + 16 * 7168 * 2 / 100e6)
    assert found.step.all_reduce_ms(device) == pytest.approx(verify + draft)
    rate = found.rate(4.0)
    assert rate.floor == pytest.approx(2 * 4 / found.floor_ms * 1e3)
    assert rate.with_all_reduce == pytest.approx(2 * 4 / (found.floor_ms + verify + draft) * 1e3)
    assert found.break_even == pytest.approx(found.floor_ms / found.plain.floor_ms(device))
    assert "drafter" not in found.plain.reads
    slow = msgspec.structs.replace(device, all_reduce_us=None)
    assert plan(K26, Cluster(mesh=TP8, device=slow), workload).rate(4.0).with_all_reduce is None


def test_what_cannot_be_planned_is_said():
    workload = Workload(context=4096, streams=1, budget=7)
    with pytest.raises(KdjaxError, match=r"no \[device\]: add kind, memory_gb and read_gb_per_s"):
        plan(K26, Cluster(mesh=TP8), workload)
    with pytest.raises(KdjaxError, match="context 300000 exceeds the model's max_position_embeddings=262144"):
        plan(K26, H200X8, workload._replace(context=300_000))
    with pytest.raises(KdjaxError, match="budget 7 needs a drafter"):
        plan(ModelPair(target=K26.target), H200X8, workload)
    with pytest.raises(KdjaxError, match="tree budget 100000 at depth 7 needs more than 100000 candidates: lower it"):
        plan(K26, H200X8, workload._replace(budget=100_000))
    deep = msgspec.structs.replace(K26.drafter, block_size=17)
    with pytest.raises(KdjaxError, match="draft depth 16 exceeds 15: use a drafter with block_size <= 16"):
        plan(ModelPair(target=K26.target, drafter=deep), H200X8, workload)
    with pytest.raises(KdjaxError, match=r"embed_tokens.weight .* cannot be cut into 3 parts"):
        plan(K26, msgspec.structs.replace(H200X8, mesh=MeshConfig(tensor=3)), workload)


def command(capsys, *argv, mesh="h200x8", status=0):
    model = str(CONFIGS / "models" / "kimi-k2.6.toml")
    assert main(["plan", model, "--mesh", str(CONFIGS / "meshes" / f"{mesh}.toml"), *argv]) == status
    return capsys.readouterr()


def test_json_has_the_promised_keys(capsys):
    argv = ["--context", "32768", "--streams", "10", "--budget", "7", "--acceptance", "4.5", "--json"]
    result = json.loads(command(capsys, *argv).out)
    size = result["bytes_per_device"]
    assert {"target_weights", "drafter_weights", "kv_cache", "workspace", "total"} <= size.keys()
    assert size["total"] == sum(value for name, value in size.items() if name != "total")
    assert result["fits"] is True and result["headroom"] == 149e9 - size["total"]
    assert result["bytes_read_per_step"]["total"] / 4490e6 == pytest.approx(result["floor_ms_per_step"])
    assert [rate["acceptance"] for rate in result["tokens_per_s"]] == [4.5]
    again = json.loads(command(capsys, *argv, "--context", "200000", mesh="rtx-pro-6000x8").out)
    assert again["fits"] is False and again["headroom"] < 0 and again["all_reduce_ms_per_step"] is None


def test_without_drafts_there_is_no_drafter_and_nothing_to_break_even(capsys):
    argv = ["--context", "4096", "--budget", "0"]
    found = json.loads(command(capsys, *argv, "--json").out)
    assert found["drafter_weights"] == {} and found["break_even_acceptance"] is None
    sizes = found["bytes_per_device"]
    assert sizes["drafter_weights"] == sizes["drafter_cache"] == 0
    out = command(capsys, *argv).out
    assert "drafter" not in out and "speculation" not in out


def test_the_default_context_is_within_the_limit_of_a_small_model(capsys, tmp_path):
    mesh = tmp_path / "one.toml"
    mesh.write_text('[mesh]\n[device]\nkind = "x"\nmemory_gb = 1\nread_gb_per_s = 10\n')
    argv = ["plan", str(CONFIGS / "models" / "nano.toml"), "--mesh", str(mesh)]
    assert main(argv) == 0
    assert "1 stream of 2048 tokens" in capsys.readouterr().out
    assert main([*argv, "--context", "2049"]) == 2
    assert "context 2049 exceeds the model's max_position_embeddings=2048" in capsys.readouterr().err


def test_the_table_says_whether_it_fits(capsys):
    out = command(capsys, "--context", "4096").out
    assert "8 x NVIDIA H200, 1 stream of 4096 tokens, 8 tokens per step (budget 7)" in out
    assert re.search(r"target routed experts +71.345\b", out) and "fits: " in out
    assert "DOES NOT FIT: " in command(capsys, "--context", "262144", "--streams", "8").out


def test_mistakes_are_one_line(capsys, tmp_path):
    for argv, said in (
        (["--budget", "2", "--acceptance", "3,3.5"], "--acceptance 3.5: a round commits at most 3 with --budget 2"),
        (["--acceptance", "0.5"], "--acceptance: expected numbers of at least 1 such as 3,4.5, not '0.5'"),
        (["--context", "300000"], "context 300000 exceeds"),
        (
            ["--budget", "100000"],
            "tree budget 100000 at depth 7 needs more than 100000 candidates: lower it to at most",
        ),
        (["--streams", "none"], "--streams: expected an integer of at least 1, not 'none'"),
    ):
        err = command(capsys, *argv, status=2).err
        assert said in err and err.count("\n") == 1
    assert "has no [device]" in command(capsys, mesh="cpu8", status=2).err
    assert main(["plan", str(tmp_path), "--mesh", str(CONFIGS / "meshes" / "h200x8.toml")]) == 2
    assert "config.json does not exist" in capsys.readouterr().err
