"""Weights in and out: exact round trips, and damage that must be noticed."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kdjax import drafter as dflash
from kdjax.checkpoint import files, int4, load_drafter, load_target, save_drafter, save_target, sha256
from kdjax.checkpoint.layout import is_ignored
from kdjax.config import DrafterOverrides
from kdjax.errors import KdjaxError
from kdjax.model import k2
from kdjax.model.int4 import Int4, dequantize
from kdjax.model.runtime import CPU_EXACT, Runtime
from kdjax.reference import checkpoint as reference
from tests.checkpoint.random_models import DRAFTER, TARGET, random_drafter, random_target

EXACT = Runtime(compute_dtype="float32", cache_dtype="float32")
BF16 = Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16")
EXPANDED = msgspec.structs.replace(BF16, expert_weights="dequantized")


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def assert_equal_values(ours, theirs):
    """The same weights under the same paths, whatever their width."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float64), y)


def damage(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.fixture
def saved(tmp_path):
    save_target(tmp_path, TARGET, random_target())
    return tmp_path


@pytest.mark.parametrize("wrapper, limit", [(False, None), (True, 20_000)])
def test_target_round_trip(tmp_path, wrapper, limit):
    params = random_target()
    save_target(tmp_path, TARGET, params, wrapper=wrapper, max_shard_bytes=limit)
    assert (tmp_path / "model.safetensors").exists() == (limit is None)
    loaded = load_target(tmp_path, EXACT)
    assert loaded.config == TARGET and loaded.skipped_tensors == 0
    assert_equal_trees(loaded.params, params)


def test_drafter_round_trip(tmp_path):
    for limit in (None, 5_000):
        folder = tmp_path / str(limit)
        save_drafter(folder, DRAFTER, random_drafter(), max_shard_bytes=limit)
        loaded = load_drafter(folder, EXACT, TARGET)
        assert loaded.config == DRAFTER
        assert_equal_trees(loaded.params, random_drafter())


def test_unquantised_experts_round_trip(tmp_path):
    config = msgspec.structs.replace(TARGET, experts_int4=None)
    save_target(tmp_path, config, random_target(config))
    loaded = load_target(tmp_path, EXACT)
    assert loaded.params["layers"][1]["mlp"]["experts"]["up_proj"]["weight"].shape == (4, 32, 64)
    assert_equal_trees(loaded.params, random_target(config))


def test_names_and_dtypes_on_disk_are_those_of_k26(tmp_path):
    save_target(tmp_path, TARGET, random_target(), wrapper=True)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "language_model.model.layers.1.mlp"
    expected = {
        "language_model.model.embed_tokens.weight": ("bfloat16", (64, 64)),
        "language_model.lm_head.weight": ("bfloat16", (64, 64)),
        "language_model.model.layers.0.mlp.down_proj.weight": ("bfloat16", (64, 40)),
        "language_model.model.layers.2.self_attn.kv_a_proj_with_mqa.weight": ("bfloat16", (36, 64)),
        f"{prefix}.gate.weight": ("bfloat16", (4, 64)),
        f"{prefix}.gate.e_score_correction_bias": ("float32", (4,)),
        f"{prefix}.shared_experts.up_proj.weight": ("bfloat16", (64, 64)),
        f"{prefix}.experts.3.up_proj.weight_packed": ("int32", (32, 8)),
        f"{prefix}.experts.3.down_proj.weight_packed": ("int32", (64, 4)),
        f"{prefix}.experts.3.down_proj.weight_scale": ("bfloat16", (64, 1)),
        f"{prefix}.experts.3.down_proj.weight_shape": ("int32", (2,)),
    }
    assert {name: (str(tensors[name].dtype), tensors[name].shape) for name in expected} == expected
    np.testing.assert_array_equal(tensors[f"{prefix}.experts.3.down_proj.weight_shape"], [64, 32])
    assert len(tensors) == 3 + 3 * 9 + 3 + 2 * (2 + 3 + 4 * 9)


def test_index_lists_every_tensor_and_the_exact_size(tmp_path):
    save_target(tmp_path, TARGET, random_target(), max_shard_bytes=20_000)
    index = json.loads((tmp_path / files.INDEX).read_text())
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert shards[0].name == f"model-00001-of-{len(shards):06d}.safetensors" and len(shards) > 3
    found = {name: shard.name for shard in shards for name in load_file(shard)}
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(a.nbytes for shard in shards for a in load_file(shard).values())
    assert all(sum(a.nbytes for a in load_file(shard).values()) <= 20_000 for shard in shards)


def test_bfloat16_mode_keeps_the_router_bias_in_float32(saved):
    params = load_target(saved, BF16).params
    mlp = params["layers"][1]["mlp"]
    assert mlp["gate"]["e_score_correction_bias"].dtype == jnp.float32
    np.testing.assert_array_equal(
        mlp["gate"]["e_score_correction_bias"], random_target()["layers"][1]["mlp"]["gate"]["e_score_correction_bias"]
    )
    assert mlp["gate"]["weight"].dtype == params["norm"]["weight"].dtype == jnp.bfloat16
    assert isinstance(mlp["experts"]["gate_proj"]["weight"], Int4)


def test_experts_are_expanded_only_on_request(saved):
    expanded = msgspec.structs.replace(EXACT, expert_weights="dequantized")
    packed = load_target(saved, EXACT).params["layers"][2]["mlp"]["experts"]["down_proj"]["weight"]
    plain = load_target(saved, expanded).params["layers"][2]["mlp"]["experts"]["down_proj"]["weight"]
    assert packed.packed.dtype == jnp.uint32 and packed.columns == 32
    np.testing.assert_array_equal(plain, dequantize(packed, jnp.dtype(jnp.float32)))


@pytest.mark.parametrize("name", ["hf_k2_a", "hf_k2_b"])
def test_foreign_checkpoint_saved_again_is_the_same_tensors(oracle, tmp_path, name):
    folder = oracle(name).checkpoint
    target = load_target(folder, BF16)
    assert target.skipped_tensors == 12
    save_target(tmp_path, target.config, target.params, wrapper=True)
    ours = load_file(tmp_path / "model.safetensors")
    theirs = {k: v for shard in folder.glob("*.safetensors") for k, v in load_file(shard).items()}
    theirs = {k: v for k, v in theirs.items() if k.startswith("language_model.")}
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        np.testing.assert_array_equal(value, theirs[key])
        assert value.dtype == (np.int32 if key.endswith("weight_shape") else theirs[key].dtype)
    assert load_target(tmp_path, BF16).config == target.config


def test_foreign_drafters_load(oracle):
    sizes = msgspec.structs.replace(TARGET, vocab_size=320, hidden_size=96, num_hidden_layers=9)
    drafter = load_drafter(oracle("dflash_full_deepseek_yarn").checkpoint, EXACT, sizes)
    assert drafter.params["fc"]["weight"].shape == (96, 4 * 96)
    assert drafter.params["layers"][2]["self_attn"]["k_norm"]["weight"].shape == (32,)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_shape", "weight_packed"])
def test_missing_parts_of_an_int4_matrix_are_listed(saved, suffix):
    key = f"model.layers.1.mlp.experts.2.up_proj.{suffix}"
    damage(saved / "model.safetensors", lambda t: t.pop(key))
    with pytest.raises(KdjaxError, match=f"1 missing from model.safetensors .{key}"):
        load_target(saved, EXACT)


def test_all_differences_come_in_one_error(saved):
    def change(tensors):
        del tensors["model.layers.0.input_layernorm.weight"], tensors["model.norm.weight"]
        tensors["model.layers.3.input_layernorm.weight"] = np.zeros(64, np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:5]
        gate = "model.layers.1.mlp.gate.e_score_correction_bias"
        tensors[gate] = tensors[gate].astype(jnp.bfloat16)

    damage(saved / "model.safetensors", change)
    with pytest.raises(KdjaxError) as error:
        load_target(saved, EXACT)
    message = str(error.value)
    assert "\n" not in message
    file = "model.safetensors"
    assert f"2 missing from {file} (model.layers.0.input_layernorm.weight, model.norm.weight)" in message
    assert f"1 unexpected (model.layers.3.input_layernorm.weight in {file})" in message
    assert f"lm_head.weight in {file} is [5, 64], expected [64, 64]" in message
    assert f"e_score_correction_bias in {file} is BF16, expected F32" in message


def test_a_wrong_weight_shape_is_refused(saved):
    key = "model.layers.1.mlp.experts.0.gate_proj.weight_shape"
    damage(saved / "model.safetensors", lambda t: t.update({key: np.array([64, 32], np.int32)}))
    with pytest.raises(KdjaxError, match=r"says \[64, 32\], config.json \[32, 64\]"):
        load_target(saved, EXACT)


def test_int64_weight_shape_is_accepted(saved):
    damage(
        saved / "model.safetensors",
        lambda t: t.update({k: v.astype(np.int64) for k, v in t.items() if k.endswith("weight_shape")}),
    )
    assert_equal_trees(load_target(saved, EXACT).params, random_target())


def test_a_truncated_shard_names_file_and_bytes(tmp_path):
    save_target(tmp_path, TARGET, random_target(), max_shard_bytes=20_000)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1024])
    with pytest.raises(KdjaxError, match=f"{shard.name} is truncated, 1024 bytes are missing"):
        load_target(tmp_path, EXACT)
    shard.write_bytes(b"\xff" * 4)
    with pytest.raises(KdjaxError, match=f"{shard.name} is (truncated|damaged)"):
        load_target(tmp_path, EXACT)


def test_reads_that_come_in_pieces_are_put_together(saved, monkeypatch):
    """One call of the system gives at most 2 GiB, as of the embedding of K2.6."""
    preadv = os.preadv
    monkeypatch.setattr("os.preadv", lambda file, buffers, at: preadv(file, [buffers[0][:500]], at))
    monkeypatch.setattr(files, "SMALL_READS", 5)
    assert_equal_trees(load_target(saved, EXACT).params, random_target())


def test_absent_shards_are_listed(tmp_path):
    save_target(tmp_path, TARGET, random_target(), max_shard_bytes=20_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    shards[0].unlink()
    shards[2].unlink()
    with pytest.raises(KdjaxError, match=f"lacks 2 of {len(shards)} shards .{shards[0].name}, {shards[2].name}"):
        load_target(tmp_path, EXACT)


def test_an_index_wins_over_stray_files(tmp_path):
    save_target(tmp_path, TARGET, random_target(), max_shard_bytes=20_000)
    stray = {name: np.zeros(3, np.float32) for name in ("model.norm.weight", "other")}
    save_file(stray, tmp_path / "model.safetensors")
    save_file(stray, tmp_path / "model-00099-of-000099.safetensors")
    assert_equal_trees(load_target(tmp_path, EXACT).params, random_target())


@pytest.mark.parametrize("index", [b'{"weight_map": {"a": 3}}', b"\xff", b"[]", b"{}"])
def test_an_unreadable_index_is_named(tmp_path, index):
    save_target(tmp_path, TARGET, random_target())
    (tmp_path / files.INDEX).write_bytes(index)
    with pytest.raises(KdjaxError, match="has no readable weight_map .*: download it again"):
        load_target(tmp_path, EXACT)


def test_an_index_that_promises_more_than_the_shards_hold(tmp_path):
    save_target(tmp_path, TARGET, random_target(), max_shard_bytes=20_000)
    index = json.loads((tmp_path / files.INDEX).read_text())
    index["weight_map"]["model.layers.9.extra"] = "model-00001-of-" + next(iter(index["weight_map"].values()))[-18:]
    (tmp_path / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(KdjaxError, match="1 tensors that their shards lack .model.layers.9.extra"):
        load_target(tmp_path, EXACT)


def test_ignore_follows_compressed_tensors():
    patterns = ("re:.*self_attn.*", "lm_head", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")
    assert is_ignored("model.layers.3.self_attn.o_proj", patterns)
    assert is_ignored("model.layers.0.mlp.down_proj", patterns)
    assert is_ignored("lm_head", patterns)
    assert not is_ignored("model.layers.3.mlp.experts.7.down_proj", patterns)
    assert not is_ignored("model.lm_head2", patterns)
    assert not is_ignored("model.layers.3.self_attn.o_proj", ("re:self_attn.*",)), "matched from the start only"
    assert is_ignored("model.layers.3.mlp.gate", ("re:language_model.*",))


def test_quantised_attention_is_refused(saved):
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"]["ignore"].remove("re:.*self_attn.*")
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(KdjaxError, match="covers model.layers.0.self_attn.q_a_proj"):
        load_target(saved, EXACT)


def test_layers_may_differ_in_whether_experts_are_packed(saved):
    """`ignore` takes layer 2's experts out of the quantisation; the loader expects and gives plain weights there."""
    experts = random_target()["layers"][2]["mlp"]["experts"]
    plain = {k: np.asarray(dequantize(v["weight"], jnp.dtype(jnp.bfloat16))) for k, v in experts.items()}

    def change(tensors):
        for name in [n for n in tensors if n.startswith("model.layers.2.mlp.experts.")]:
            *_, expert, projection, _ = name.split(".")
            del tensors[name]
            tensors[name.rpartition(".")[0] + ".weight"] = plain[projection][int(expert)]

    damage(saved / "model.safetensors", change)
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"]["ignore"].append(r"re:.*layers\.2\.mlp\.experts.*")
    (saved / "config.json").write_text(json.dumps(config))
    layers = load_target(saved, BF16).params["layers"]
    assert isinstance(layers[1]["mlp"]["experts"]["up_proj"]["weight"], Int4)
    np.testing.assert_array_equal(layers[2]["mlp"]["experts"]["up_proj"]["weight"], plain["up_proj"])


def test_a_group_size_that_does_not_divide_is_refused_before_reading(saved):
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 48
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(KdjaxError, match="64 columns, not a multiple of group_size=48"):
        load_target(saved, EXACT)


def test_params_that_do_not_fit_their_config_are_not_written(tmp_path):
    params = random_target()
    experts = params["layers"][1]["mlp"]["experts"]
    packed = experts["up_proj"]["weight"]
    experts["up_proj"]["weight"] = dequantize(packed, jnp.dtype(jnp.float32))
    with pytest.raises(KdjaxError, match="layers.1.mlp.experts.up_proj.weight .*encode the experts"):
        save_target(tmp_path, TARGET, params)
    experts["up_proj"]["weight"] = int4.encode(np.ones((4, 32, 32), np.float32), 32, "max/7")
    with pytest.raises(KdjaxError, match="32 columns"):
        save_target(tmp_path, TARGET, params)
    experts["up_proj"]["weight"] = int4.encode(np.ones((4, 32, 64), np.float32), 16, "max/7")
    with pytest.raises(KdjaxError, match="64 columns in groups of 16, its config 64 in groups of 32"):
        save_target(tmp_path, TARGET, params)
    experts["up_proj"]["weight"] = packed
    params["norm"]["weight"] = np.ones(65, np.float32)
    with pytest.raises(KdjaxError, match=r"norm.weight is \[65\]"):
        save_target(tmp_path, TARGET, params)
    params["mtp"] = {"weight": params.pop("norm")["weight"]}
    with pytest.raises(KdjaxError, match="lack 1 weights .*norm.weight"):
        save_target(tmp_path, TARGET, params)
    assert not list(tmp_path.iterdir())


def test_weights_are_never_mixed_with_older_ones(saved):
    with pytest.raises(KdjaxError, match="already holds weights"):
        save_target(saved, TARGET, random_target(), max_shard_bytes=20_000)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden_size": 128}, "hidden_size 64, but target.hidden_size = 128"),
        ({"vocab_size": 128}, "vocab_size 64, but target.vocab_size = 128"),
        ({"num_hidden_layers": 4}, "num_hidden_layers 3, but target.num_hidden_layers = 4"),
    ],
)
def test_a_drafter_of_another_target_is_refused(tmp_path, change, words):
    save_drafter(tmp_path, DRAFTER, random_drafter())
    with pytest.raises(KdjaxError, match=words):
        load_drafter(tmp_path, EXACT, msgspec.structs.replace(TARGET, **change))


def test_overrides_change_how_a_drafter_attends_and_nothing_else(tmp_path):
    save_drafter(tmp_path, DRAFTER, random_drafter())
    plain = load_drafter(tmp_path, EXACT, TARGET, overrides=DrafterOverrides())
    assert plain.config == DRAFTER
    changes = DrafterOverrides(is_causal=False, sliding_window=7, attention_factor=1.41589)
    changed = load_drafter(tmp_path, EXACT, TARGET, overrides=changes)
    rope = msgspec.structs.replace(DRAFTER.rope_scaling, attention_factor=1.41589)
    assert changed.config == msgspec.structs.replace(DRAFTER, is_causal=False, sliding_window=7, rope_scaling=rope)
    assert_equal_trees(changed.params, plain.params)
    full = msgspec.structs.replace(DRAFTER, layer_types=("full_attention",) * 2, rope_scaling=None)
    for overrides in (DrafterOverrides(sliding_window=7), DrafterOverrides(attention_factor=1.0)):
        with pytest.raises(KdjaxError, match="the drafter has no .*, leave it out"):
            overrides.apply(full)


def test_a_pinned_hash_refuses_other_bytes_of_the_same_name(tmp_path):
    save_drafter(tmp_path / "a", DRAFTER, random_drafter())
    pinned = sha256(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    load_drafter(tmp_path / "b", EXACT, TARGET, expected_sha256=pinned)
    damage(tmp_path / "b" / "model.safetensors", lambda t: t.update({"norm.weight": t["norm.weight"] * 2}))
    with (tmp_path / "a" / "config.json").open("a") as file:
        file.write("\n")
    for folder in ("a", "b"):
        with pytest.raises(KdjaxError, match=f"expected {pinned}"):
            load_drafter(tmp_path / folder, EXACT, TARGET, expected_sha256=pinned)


def test_a_folder_without_a_checkpoint(tmp_path):
    save_target(tmp_path, TARGET, random_target())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(KdjaxError, match="neither model.safetensors.index.json nor model.safetensors"):
        load_target(tmp_path, EXACT)


@pytest.mark.parametrize("experts_int4", [TARGET.experts_int4, None])
@pytest.mark.parametrize("runtime", [BF16, EXPANDED, CPU_EXACT], ids=["packed", "dequantized", "fused"])
def test_loaded_params_are_what_the_models_declare(tmp_path, experts_int4, runtime):
    config = msgspec.structs.replace(TARGET, experts_int4=experts_int4)
    save_target(tmp_path / "target", config, random_target(config))
    save_drafter(tmp_path / "drafter", DRAFTER, random_drafter())
    target = load_target(tmp_path / "target", runtime)
    drafter = load_drafter(tmp_path / "drafter", runtime, target.config)
    for params, declared in (
        (target.params, k2.abstract_params(config, runtime)),
        (drafter.params, dflash.abstract_params(DRAFTER, runtime)),
    ):
        assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(
            lambda a: (a.shape, a.dtype), declared
        )


@pytest.mark.parametrize("wrapper, limit", [(False, None), (True, 20_000)])
def test_the_reference_reads_what_we_write(tmp_path, wrapper, limit):
    params = random_target()
    save_target(tmp_path / "target", TARGET, params, wrapper=wrapper, max_shard_bytes=limit)
    save_drafter(tmp_path / "drafter", DRAFTER, random_drafter(), max_shard_bytes=limit)
    config, theirs = reference.read_target(tmp_path / "target")
    assert config == TARGET
    expanded = load_target(tmp_path / "target", msgspec.structs.replace(EXACT, expert_weights="dequantized")).params
    assert_equal_values(expanded, theirs)
    config, theirs = reference.read_drafter(tmp_path / "drafter")
    assert config == DRAFTER
    assert_equal_values(random_drafter(), theirs)
