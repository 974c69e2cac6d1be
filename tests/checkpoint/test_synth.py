"""Synthetic checkpoints: sane values, reproducible by seed and name, the published division into files."""

import json

import msgspec
import numpy as np
import pytest

from kdjax.checkpoint import int4, load_drafter, load_target, synth
from kdjax.checkpoint.files import TensorFolder
from kdjax.errors import KdjaxError
from kdjax.model.runtime import Runtime
from kdjax.tokenizer import Tokenizer
from tests.checkpoint.random_models import DRAFTER, TARGET

BF16 = Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16")
CONFIG = msgspec.structs.replace(TARGET, vocab_size=1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("synth")
    told = []
    written = synth.write_target(path, CONFIG, seed=3, workers=2, progress=lambda *of: told.append(of))
    assert told[-1] == (written, written)
    return path


def test_it_loads_and_is_divided_into_files_as_published(folder):
    assert load_target(folder, BF16).config == CONFIG
    shard_of = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in shard_of.items():
        layer = name.removeprefix("language_model.model.layers.").partition(".")[0]
        assert file == f"model-{int(layer) + 1 if layer.isdecimal() else 4:05d}-of-000004.safetensors"


def test_a_tensor_depends_on_seed_and_name_only(folder, tmp_path):
    short, _ = synth.shorten(CONFIG, None, 2)
    synth.write_target(tmp_path / "short", short, seed=3)
    synth.write_target(tmp_path / "other", short, seed=4)
    long, short, other = map(TensorFolder, (folder, tmp_path / "short", tmp_path / "other"))
    assert short.tensors.keys() < long.tensors.keys()
    for name in short.tensors:
        np.testing.assert_array_equal(short.read(name), long.read(name))
        if not name.endswith("weight_shape"):
            assert (short.read(name) != other.read(name)).any()


def test_values_have_the_spread_of_trained_ones(tmp_path):
    config = msgspec.structs.replace(TARGET, hidden_size=1024, n_routed_experts=2, num_hidden_layers=2)
    synth.write_target(tmp_path, config)
    files = TensorFolder(tmp_path, prefix="language_model.")

    def read(name):
        return files.read(name).astype(np.float64)

    assert read("model.layers.0.self_attn.q_a_proj.weight").std() == pytest.approx(1024**-0.5, rel=0.03)
    assert read("model.embed_tokens.weight").std() == pytest.approx(1, rel=0.02)
    assert read("model.norm.weight").mean() == pytest.approx(1, abs=0.01)
    module = "model.layers.1.mlp.experts.1.gate_proj"
    codes = int4.unpack(files.read(f"{module}.weight_packed"), 1024)
    assert sorted(set(codes.flat)) == list(range(-7, 8))
    scale = files.read(f"{module}.weight_scale").astype(np.float64)
    assert (codes * np.repeat(scale, 32, axis=1)).std() == pytest.approx(1024**-0.5, rel=0.03)
    assert len(np.unique(scale)) > 10 and (scale > 0).all()


def test_the_ranks_fit_the_vocabulary(folder):
    tokenizer = Tokenizer.from_checkpoint(folder)
    assert tokenizer.vocab_size == CONFIG.vocab_size
    assert tokenizer.decode(tokenizer.encode("naïve 中文\n")) == "naïve 中文\n"


def test_fewer_layers_keep_target_and_drafter_together(tmp_path):
    target, drafter = synth.shorten(CONFIG, DRAFTER, 2)
    assert (target.num_hidden_layers, drafter.num_target_layers, drafter.target_layer_ids) == (2, 2, (0, 1))
    _, one = synth.shorten(CONFIG, DRAFTER, 1)
    assert one.target_layer_ids == (0, 0)
    with pytest.raises(KdjaxError, match="has 3 layers, not 4"):
        synth.shorten(CONFIG, DRAFTER, 4)
    drafter = msgspec.structs.replace(drafter, vocab_size=1024)
    synth.write_drafter(tmp_path, drafter)
    assert load_drafter(tmp_path, BF16, target).config == drafter
