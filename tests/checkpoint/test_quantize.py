"""A bf16 folder against its INT4 folder: third-party packing, and nothing else touched."""

import json

import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kdjax import reference
from kdjax.checkpoint import int4, load_target, save_target
from kdjax.checkpoint.files import TensorFolder
from kdjax.checkpoint.quantize import quantize_folder
from kdjax.config import Int4Config
from kdjax.errors import KdjaxError
from kdjax.model.int4 import Int4
from kdjax.model.runtime import Runtime
from kdjax.reference.checkpoint import read_target
from tests.checkpoint.random_models import TARGET, random_target

DENSE = msgspec.structs.replace(TARGET, experts_int4=None)
PACKED = Runtime(compute_dtype="float32", cache_dtype="float32")
RULES = {"max/7.5": "lib7.5", "max/7": "max7"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A wrapped bf16 checkpoint with a vision tensor and a tokenizer file."""
    folder = tmp_path_factory.mktemp("dense")
    save_target(folder, DENSE, random_target(DENSE), wrapper=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["vision_tower.patch_embed.proj.weight"] = np.ones((2, 3), ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tiktoken.model").write_bytes(b"YQ== 0\n")
    return folder


@pytest.mark.parametrize("rule", RULES)
def test_the_result_loads_as_the_codes_of_each_matrix(dense, tmp_path, rule):
    done = quantize_folder(dense, tmp_path, rule=rule, max_shard_bytes=20_000, workers=2)
    before, after = TensorFolder(dense), TensorFolder(tmp_path)
    n_experts = (TARGET.num_hidden_layers - 1) * TARGET.n_routed_experts * 3
    assert (done.matrices, done.matrices + done.copied) == (n_experts, len(before.tensors))
    assert done.bytes_after == sum(stored.nbytes for stored in after.tensors.values()) < done.bytes_before
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert (tmp_path / "tiktoken.model").read_bytes() == b"YQ== 0\n"

    for name, stored in before.tensors.items():
        if ".mlp.experts." not in name:
            assert after.tensors[name] == stored
            np.testing.assert_array_equal(after.read(name), before.read(name))
            continue
        codes, scale = reference.int4.quantise(before.read(name), 32, float(rule.removeprefix("max/")))
        np.testing.assert_array_equal(after.read(f"{name}_packed"), reference.int4.pack(codes))
        np.testing.assert_array_equal(after.read(f"{name}_scale"), scale)

    loaded = load_target(tmp_path, PACKED)
    assert loaded.config == TARGET and loaded.skipped_tensors == 1
    matrix = loaded.params["layers"][1]["mlp"]["experts"]["gate_proj"]["weight"]
    assert isinstance(matrix, Int4)
    config, params = read_target(tmp_path)
    assert config.experts_int4 == Int4Config(group_size=32)


@pytest.mark.parametrize("rule", RULES)
def test_bytes_are_those_of_compressed_tensors(oracle, tmp_path, rule):
    """The library's own weights as experts of a model that has their width."""
    case = oracle("pack_quantize")
    weight = case.inputs["weight_bf16"]
    rows, columns = 32, weight.shape[1]  # rows are repeated: down_proj has as many columns, so whole groups
    sizes = {"hidden_size": columns, "moe_intermediate_size": rows, "num_hidden_layers": 2, "n_routed_experts": 2}
    config = msgspec.structs.replace(DENSE, **sizes)
    params = random_target(config)
    weight = np.resize(weight, (rows, columns))
    params["layers"][1]["mlp"]["experts"]["up_proj"]["weight"] = np.stack([weight, weight]).astype(np.float32)
    save_target(tmp_path / "dense", config, params)
    quantize_folder(tmp_path / "dense", tmp_path / "int4", rule=rule)
    files, name = TensorFolder(tmp_path / "int4"), "model.layers.1.mlp.experts.1.up_proj.weight"
    expected = np.resize(case.expected[f"{RULES[rule]}.weight_packed"], (rows, columns // 8))
    np.testing.assert_array_equal(files.read(f"{name}_packed"), expected)
    used = int4.unpack(expected, columns).reshape(len(weight), -1, 32).any(-1)  # a group of zeros may have any scale
    scale = np.resize(case.expected[f"{RULES[rule]}.weight_scale"], used.shape)
    np.testing.assert_array_equal(files.read(f"{name}_scale")[used], scale[used])


def test_what_cannot_be_quantised_is_named_and_leaves_no_weights(dense, tmp_path):
    quantize_folder(dense, tmp_path / "int4")
    with pytest.raises(KdjaxError, match="is INT4 already"):
        quantize_folder(tmp_path / "int4", tmp_path / "again")
    with pytest.raises(KdjaxError, match="already holds weights"):
        quantize_folder(dense, tmp_path / "int4")
    with pytest.raises(KdjaxError, match="group_size=48"):
        quantize_folder(dense, tmp_path / "uneven", group_size=48)

    tensors = load_file(dense / "model.safetensors")
    name = "language_model.model.layers.2.mlp.experts.3.down_proj.weight"
    tensors[name] = tensors[name] * ml_dtypes.bfloat16(np.nan)
    (tmp_path / "nan").mkdir()
    save_file(tensors, tmp_path / "nan" / "model.safetensors")
    (tmp_path / "nan" / "config.json").write_bytes((dense / "config.json").read_bytes())
    with pytest.raises(KdjaxError, match=rf"nan: {name}: cannot quantize a weight with NaN"):
        quantize_folder(tmp_path / "nan", tmp_path / "out", workers=3)
    assert list((tmp_path / "out").iterdir()) == []

    del tensors[name]
    save_file(tensors, tmp_path / "nan" / "model.safetensors")
    with pytest.raises(KdjaxError, match="1 missing"):
        quantize_folder(tmp_path / "nan", tmp_path / "out")


def test_the_written_config_is_that_of_the_source_with_the_quantisation(dense, tmp_path):
    quantize_folder(dense, tmp_path)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (dense, tmp_path))
    quantisation = after["text_config"].pop("quantization_config")
    assert after == before
    assert quantisation["format"] == "pack-quantized" and "re:vision_tower.*" in quantisation["ignore"]
