import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kdjax.errors import KdjaxError
from kdjax.reference import checkpoint


def leaves(params, path=()):
    for key, value in params.items():
        yield from leaves(value, (*path, key)) if isinstance(value, dict) else [((*path, key), value)]


def write(folder, config, tensors):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def text_model(oracle):
    """(text config, its tensors without the wrapper's prefix) of a wrapped checkpoint."""
    folder = oracle("hf_k2_a").checkpoint
    tensors = {name: t for shard in sorted(folder.glob("*.safetensors")) for name, t in load_file(shard).items()}
    text = {n.removeprefix("language_model."): t for n, t in tensors.items() if n.startswith("language_model.")}
    assert len(text) < len(tensors)
    return json.loads((folder / "config.json").read_text())["text_config"], text


def test_a_bare_folder_reads_as_the_wrapped_one(target, text_model, tmp_path):
    write(tmp_path, *text_model)
    config, params = checkpoint.read_target(tmp_path)
    wrapped_config, wrapped = target("hf_k2_a")
    assert config == wrapped_config
    ours, theirs = dict(leaves(params)), dict(leaves(wrapped))
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        np.testing.assert_array_equal(array, theirs[path], str(path))
        assert array.dtype == np.float64


def test_experts_stored_as_bfloat16_read_alike(target, text_model, tmp_path):
    raw, tensors = text_model
    config, packed = target("hf_k2_a")
    plain = {n: t for n, t in tensors.items() if ".experts." not in n}
    for i in range(config.first_k_dense_replace, config.num_hidden_layers):
        for name, stack in packed["layers"][i]["mlp"]["experts"].items():
            for e, weight in enumerate(stack["weight"]):
                key = f"model.layers.{i}.mlp.experts.{e}.{name}.weight"
                plain[key] = weight.astype(ml_dtypes.bfloat16)
    write(tmp_path, {k: v for k, v in raw.items() if k != "quantization_config"}, plain)
    read, params = checkpoint.read_target(tmp_path)
    assert read.experts_int4 is None
    for name, stack in packed["layers"][1]["mlp"]["experts"].items():
        np.testing.assert_array_equal(params["layers"][1]["mlp"]["experts"][name]["weight"], stack["weight"])


def test_a_stray_file_beside_an_index_is_ignored(oracle, target, tmp_path):
    shutil.copytree(oracle("hf_k2_a").checkpoint, tmp_path, dirs_exist_ok=True)
    save_file({"model.norm.weight": np.zeros(256, np.float32)}, tmp_path / "model.safetensors")
    _, params = checkpoint.read_target(tmp_path)
    np.testing.assert_array_equal(params["norm"]["weight"], target("hf_k2_a")[1]["norm"]["weight"])


def test_a_truncated_file_is_named(text_model, tmp_path):
    write(tmp_path, *text_model)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(KdjaxError, match=r"model\.safetensors cannot be read \(.*: download it again"):
        checkpoint.read_target(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_does_not_end_the_process(text_model, tmp_path):
    raw, tensors = text_model
    write(tmp_path, raw, tensors)

    def keep(name):
        os.truncate(tmp_path / "model.safetensors", 0)
        return name

    read = dict(checkpoint._tensors(tmp_path, keep))
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(read[name], value)


def test_yarn_without_mscale_keys_scales_the_amplitude(oracle, tmp_path):
    shutil.copytree(oracle("dflash_swa_short_context").checkpoint, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    raw[key] = {k: v for k, v in raw[key].items() if not k.startswith("mscale")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config, _ = checkpoint.read_drafter(tmp_path)
    assert config.rope_scaling.attention_factor == pytest.approx(1.4158883, rel=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        (
            {
                "quantization_config": {
                    "format": "int-quantized",
                    "config_groups": {"group_0": {"weights": {"num_bits": 8, "symmetric": True, "group_size": 32}}},
                }
            },
            "quantization 'int-quantized'",
        ),
    ],
)
def test_formats_it_does_not_know_are_refused(text_model, tmp_path, change, message):
    raw, tensors = text_model
    write(tmp_path, raw | change, tensors)
    with pytest.raises(KdjaxError, match=message):
        checkpoint.read_target(tmp_path)
