"""config.json in and out."""

import json

import msgspec
import pytest

from kdjax.checkpoint import read_drafter_config, read_model_config, write_drafter_config, write_model_config
from kdjax.config import Int4Config, YarnConfig
from kdjax.errors import KdjaxError
from tests.checkpoint.random_models import DRAFTER, TARGET


def edit(folder, change):
    file = folder / "config.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def delete(values, dotted):
    *path, last = dotted.split(".")
    for key in path:
        values = values[key]
    del values[last]


def put(values, dotted, value):
    *path, last = dotted.split(".")
    for key in path:
        values = values[key]
    values[last] = value


@pytest.mark.parametrize("wrapper", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"eos_token_ids": (7,)},
        {"eos_token_ids": (), "bos_token_id": None, "pad_token_id": None},
        {"experts_int4": None, "norm_topk_prob": False, "first_k_dense_replace": 0},
        {"experts_int4": Int4Config(group_size=16)},
        {"rope_scaling": None, "rms_norm_eps": 1e-6},
        {"rope_scaling": YarnConfig(factor=4.0, original_max_position_embeddings=512, attention_factor=1.25)},
        {"rope_scaling": YarnConfig(factor=4.0, original_max_position_embeddings=512, beta_fast=1.0, mscale=0.7)},
    ],
)
def test_target_config_round_trip(tmp_path, wrapper, change):
    config = msgspec.structs.replace(TARGET, **change)
    write_model_config(tmp_path, config, wrapper=wrapper)
    assert read_model_config(tmp_path) == config


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"is_causal": True},
        {"is_causal": False},
        {"layer_types": ("full_attention", "full_attention"), "sliding_window": None},
        {"rope_scaling": None},
        {"rope_scaling": YarnConfig(factor=64.0, original_max_position_embeddings=64, attention_factor=1.41589)},
    ],
)
def test_drafter_config_round_trip(tmp_path, change):
    config = msgspec.structs.replace(DRAFTER, **change)
    write_drafter_config(tmp_path, config)
    assert read_drafter_config(tmp_path) == config


def test_k26_style_wrapper(oracle):
    config = read_model_config(oracle("hf_k2_a").checkpoint)
    assert config.rope_scaling == YarnConfig(factor=64.0, original_max_position_embeddings=64)
    assert (config.first_k_dense_replace, config.num_hidden_layers, config.latent_dim) == (1, 4, 80)
    assert (config.experts_int4, config.latent_norm_eps, config.rms_norm_eps) == (Int4Config(group_size=32), 1e-6, 1e-5)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (504, (506,), 511)
    assert read_model_config(oracle("hf_k2_b").checkpoint).first_k_dense_replace == 2


def test_both_rotary_layouts_of_drafters(oracle):
    plain = read_drafter_config(oracle("dflash_full_yarn").checkpoint)
    nested = read_drafter_config(oracle("dflash_full_deepseek_yarn").checkpoint)
    assert plain.rope_theta == nested.rope_theta == 50000.0
    assert plain.rope_scaling == YarnConfig(factor=64.0, original_max_position_embeddings=32)
    assert nested.rope_scaling == YarnConfig(factor=64.0, original_max_position_embeddings=24)


def test_layer_pattern_of_the_k26_drafter(oracle):
    config = read_drafter_config(oracle("dflash_swa_causal").checkpoint)
    assert config.layer_types == ("sliding_attention",) * 5 + ("full_attention",)
    assert (config.sliding_window, config.is_causal, config.block_size) == (12, None, 8)
    assert config.target_layer_ids == (1, 12, 24, 35, 47, 58)
    assert [config.causal_in_block(i) for i in range(6)] == [True] * 5 + [False]
    overridden = read_drafter_config(oracle("dflash_swa_is_causal_false").checkpoint)
    assert [overridden.causal_in_block(i) for i in range(3)] == [False] * 3


def test_yarn_without_mscale_keys_is_amplified(tmp_path):
    write_drafter_config(tmp_path, DRAFTER)
    edit(tmp_path, lambda v: (delete(v, "rope_parameters.mscale"), delete(v, "rope_parameters.mscale_all_dim")))
    yarn = read_drafter_config(tmp_path).rope_scaling
    assert yarn.attention_factor == pytest.approx(1.4158883) and yarn.mscale_all_dim == 0


def test_generation_config_says_what_stops(tmp_path):
    write_model_config(tmp_path, TARGET)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_model_config(tmp_path).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").unlink()
    assert read_model_config(tmp_path).eos_token_ids == (61, 62)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("model_type", "llama", "kimi_k25, kimi_k2 or deepseek_v3"),
        ("n_group", 8, "only 1 is supported"),
        ("topk_group", 4, "only 1 is supported"),
        ("scoring_func", "softmax", "sigmoid"),
        ("topk_method", "greedy", "noaux_tc"),
        ("attention_bias", True, "only false"),
        ("moe_layer_freq", 2, "only 1"),
        ("hidden_act", "gelu", "silu"),
        ("tie_word_embeddings", True, "only false"),
        ("num_nextn_predict_layers", 1, "only 0"),
        ("rope_interleave", False, "only true"),
        ("q_lora_rank", None, "integer of at least 1"),
        ("num_key_value_heads", 1, "equal to num_attention_heads"),
        ("hidden_size", "7168", "integer of at least 1"),
        ("num_hidden_layers", True, "integer of at least 1"),
        ("vocab_size", 0, "integer of at least 1"),
        ("rms_norm_eps", -1.0, "positive number"),
        ("norm_topk_prob", 1, "true or false"),
        ("rope_scaling.type", "linear", "yarn"),
        ("rope_theta", 1.0, "number above 1"),
        ("quantization_config.ignore", ["re:("], "re:( is no regular expression"),
        ("rope_scaling.truncate", False, "only true"),
        ("quantization_config.quant_method", "fp8", "compressed-tensors"),
        ("quantization_config.format", "marlin-24", "pack-quantized"),
        ("quantization_config.kv_cache_scheme", {"num_bits": 8}, "only null"),
        ("quantization_config.config_groups.group_0.targets", ["re:.*"], "Linear"),
        ("quantization_config.config_groups.group_0.weights.num_bits", 8, "only 4"),
        ("quantization_config.config_groups.group_0.weights.symmetric", False, "only true"),
        ("quantization_config.config_groups.group_0.weights.strategy", "channel", "group"),
        ("quantization_config.config_groups.group_0.weights.actorder", "group", "only null"),
    ],
)
def test_unsupported_target_values_are_refused(tmp_path, key, value, words):
    write_model_config(tmp_path, TARGET)
    edit(tmp_path, lambda v: put(v, key, value))
    with pytest.raises(KdjaxError) as error:
        read_model_config(tmp_path)
    message = str(error.value)
    assert key in message and words in message and "\n" not in message
    assert json.dumps(value) in message


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "rope_theta", "rope_scaling", "rope_scaling.beta_fast", "rope_scaling.factor", "norm_topk_prob"]
    + ["routed_scaling_factor", "first_k_dense_replace", "n_shared_experts", "quantization_config.ignore"],
)
def test_absent_target_keys_are_named(tmp_path, key):
    write_model_config(tmp_path, TARGET)
    edit(tmp_path, lambda v: delete(v, key))
    with pytest.raises(KdjaxError, match=f"{key} is missing"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    "key",
    ["layer_types", "block_size", "num_target_layers", "dflash_config", "dflash_config.target_layer_ids"]
    + ["dflash_config.mask_token_id", "rope_parameters.rope_theta", "rope_parameters.rope_type"]
    + ["rope_parameters.beta_slow", "rms_norm_eps", "head_dim", "architectures"],
)
def test_absent_drafter_keys_are_named(tmp_path, key):
    write_drafter_config(tmp_path, DRAFTER)
    edit(tmp_path, lambda v: delete(v, key))
    with pytest.raises(KdjaxError, match=f"{key} is missing"):
        read_drafter_config(tmp_path)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("sliding_window", None, "sliding_window is not set"),
        ("use_sliding_window", False, "contradicts layer_types"),
        ("layer_types", ["full_attention", "chunked_attention"], "chunked_attention"),
        ("layer_types", ["full_attention"], "1 entries for num_hidden_layers=2"),
        ("is_causal", "yes", "true or false"),
        ("dflash_config.target_layer_ids", [0, 3], "outside the target's 3 layers"),
        ("dflash_config.mask_token_id", -1, "at least 0"),
        ("dflash_config.mask_token_id", 64, "mask_token_id=64 is outside the vocabulary of 64"),
        ("rope_parameters.rope_type", "longrope", "longrope"),
        ("attention_bias", True, "only false"),
        ("architectures", None, "architectures is null"),
    ],
)
def test_unsupported_drafter_values_are_refused(tmp_path, key, value, words):
    write_drafter_config(tmp_path, DRAFTER)
    edit(tmp_path, lambda v: put(v, key, value))
    with pytest.raises(KdjaxError, match=words):
        read_drafter_config(tmp_path)


def test_files_that_are_not_configs(tmp_path):
    with pytest.raises(KdjaxError, match="does not exist"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(KdjaxError, match="cannot be read as JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(KdjaxError, match="not an object"):
        read_drafter_config(tmp_path)


def test_an_epsilon_without_a_key_is_not_written(tmp_path):
    with pytest.raises(KdjaxError, match="latent_norm_eps"):
        write_model_config(tmp_path, msgspec.structs.replace(TARGET, latent_norm_eps=1e-5))
