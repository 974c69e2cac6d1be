"""Damaged folders: each is refused with one line that names file and tensor, quickly, and never loads wrong weights."""

import itertools
import json
import os
import re
import shutil
import time

import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kdjax.checkpoint import load_drafter, load_target, save_drafter, save_target, stream
from kdjax.checkpoint.files import TensorFolder
from kdjax.checkpoint.writer import INDEX
from kdjax.config import MeshConfig
from kdjax.errors import KdjaxError
from kdjax.model.runtime import Runtime
from tests.checkpoint.random_models import DRAFTER, TARGET, random_drafter, random_target

BF16 = Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16")
SINGLE = "model.safetensors"
EXPERT = "model.layers.1.mlp.experts.2.down_proj"
GATE = "model.layers.1.mlp.gate.e_score_correction_bias"


class Folder:
    """A copy of a sound checkpoint, and the ways to damage it."""

    def __init__(self, path):
        self.path = path

    @property
    def shards(self):
        return sorted(self.path.glob("*.safetensors"))

    def shard_of(self, name):
        return self.path / json.loads((self.path / INDEX).read_text())["weight_map"][name]

    def tensors(self, change, file=None):
        file = file or self.path / SINGLE
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    def header(self, change, file=None):
        """`change` edits the parsed header; its text may be returned instead. The data stays as it is."""
        file = file or self.path / SINGLE
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        text = change(header) or json.dumps(header)
        text = text if isinstance(text, bytes) else text.encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    def json(self, name, change):
        value = json.loads((self.path / name).read_text())
        change(value)
        (self.path / name).write_text(json.dumps(value))


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("sound")
    save_target(root / "single", TARGET, random_target())
    save_target(root / "sharded", TARGET, random_target(), wrapper=True, max_shard_bytes=30_000)
    save_drafter(root / "drafter", DRAFTER, random_drafter())
    return root


@pytest.fixture
def no_device(monkeypatch):
    """Faults that headers, index and config show must come before any array is placed."""

    def placed(*args):
        raise AssertionError("device memory was taken before the fault was found")

    monkeypatch.setattr(stream, "_chunks", placed)


def refused(load, *words):
    started = time.monotonic()
    with pytest.raises(KdjaxError) as error:
        load()
    assert time.monotonic() - started < 5
    message = str(error.value)
    assert message.isprintable() and len(message) < 4000
    for word in words:
        assert word in message, message
    return message


def cut(file, nbytes):
    """Keep the first `nbytes`, or all but the last `-nbytes`."""
    file.write_bytes(file.read_bytes()[:nbytes])


def set_header_length(folder, length):
    file = folder.path / SINGLE
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])


def entry(**change):
    return lambda folder: folder.header(lambda header: header[f"{EXPERT}.weight_packed"].update(change))


def tensor(name, make):
    return lambda folder: folder.tensors(lambda tensors: tensors.update({name: make(tensors[name])}))


def shift_offsets(header):
    header[f"{EXPERT}.weight_packed"]["data_offsets"] = [
        n - 4 for n in header[f"{EXPERT}.weight_packed"]["data_offsets"]
    ]


def duplicate_key(header):
    name = "model.norm.weight"
    return json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"


def rename(old, new):
    return lambda folder: folder.tensors(lambda tensors: tensors.update({new: tensors.pop(old)}))


def also(name, of):
    return lambda folder: folder.tensors(lambda tensors: tensors.update({name: tensors[of].copy()}))


def drop(name):
    return lambda folder: folder.tensors(lambda tensors: tensors.pop(name))


def append(nbytes):
    def damage(folder):
        with (folder.path / SINGLE).open("ab") as file:
            file.write(b"\0" * nbytes)

    return damage


def replaced(make):
    """The single file becomes something else."""

    def damage(folder):
        file = folder.path / SINGLE
        file.unlink()
        make(file)

    return damage


def quantization(change, of="weights"):
    def edit(config):
        found = config["quantization_config"]
        group = found["config_groups"]["group_0"]
        {"top": found, "group": group, "weights": group["weights"]}[of].update(change)

    return lambda folder: folder.json("config.json", edit)


def config(**change):
    return lambda folder: folder.json("config.json", lambda values: values.update(change))


SINGLE_FILE = {
    # the file as a whole
    "truncated": (lambda f: cut(f.path / SINGLE, -100), [SINGLE, "is truncated, 100 bytes are missing from"]),
    "truncated in the header": (lambda f: cut(f.path / SINGLE, 500), [SINGLE, "is truncated", "of a header of"]),
    "truncated in the header length": (lambda f: cut(f.path / SINGLE, 5), [SINGLE, "truncated, 3 bytes of its header"]),
    "empty file": (lambda f: cut(f.path / SINGLE, 0), [SINGLE, "is empty"]),
    "bytes after the end": (append(64), [SINGLE, "has 64 bytes after its last tensor"]),
    "a folder": (replaced(lambda file: file.mkdir()), [SINGLE, "is not a regular file"]),
    "a pipe": (replaced(os.mkfifo), [SINGLE, "is not a regular file"]),
    "a symlink loop": (replaced(lambda file: file.symlink_to(file.name)), [SINGLE, "symbolic links"]),
    "a dangling symlink": (replaced(lambda file: file.symlink_to("gone")), [SINGLE, "No such file"]),
    "a git-lfs pointer": (
        replaced(lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")),
        [SINGLE, "claims a header of"],
    ),
    "an html page": (replaced(lambda file: file.write_text("<!DOCTYPE html>" * 9)), [SINGLE, "claims a header of"]),
    # the header
    "header length 2^64 - 1": (lambda f: set_header_length(f, 2**64 - 1), [SINGLE, "claims a header of"]),
    "header length beyond the file": (lambda f: set_header_length(f, 90_000_000), [SINGLE, "is truncated"]),
    "header length too short": (lambda f: set_header_length(f, 100), [SINGLE, "header that cannot be read"]),
    "header length zero": (lambda f: set_header_length(f, 0), [SINGLE, "header that cannot be read"]),
    "header is not utf-8": (lambda f: f.header(lambda h: b"\xff" * 200), [SINGLE, "header that cannot be read"]),
    "header is a list": (lambda f: f.header(lambda h: "[]"), [SINGLE, "not a JSON object"]),
    "header nested without end": (lambda f: f.header(lambda h: '{"a":' + "[" * 100_000), [SINGLE, "cannot be read"]),
    "header with NaN": (lambda f: f.header(lambda h: '{"a": NaN}'), [SINGLE, "NaN is not JSON"]),
    "a name twice": (lambda f: f.header(duplicate_key), [SINGLE, "model.norm.weight is there twice"]),
    "metadata that is not text": (
        lambda f: f.header(lambda h: h.update(__metadata__={"format": 3})),
        [SINGLE, "__metadata__"],
    ),
    "unknown dtype": (entry(dtype="I4"), [SINGLE, EXPERT, "unknown dtype 'I4'"]),
    "dtype of another size": (entry(dtype="I64"), [SINGLE, EXPERT, "bytes, but I64 [64, 4] takes 2048"]),
    "negative size": (entry(shape=[-64, 4]), [SINGLE, EXPERT, "the shape [-64, 4]"]),
    "fractional size": (entry(shape=[64.0, 4]), [SINGLE, EXPERT, "the shape [64.0, 4]"]),
    "boolean size": (entry(shape=[True, 4]), [SINGLE, EXPERT, "the shape [True, 4]"]),
    "size beyond any memory": (entry(shape=[2**62, 2**62]), [SINGLE, EXPERT, "takes"]),
    "a million dimensions": (entry(shape=[9] * 1_000_000), [SINGLE, EXPERT, "not a list of sizes"]),
    "huge declared data": (entry(shape=[64, 2**40], data_offsets=[0, 2**48]), [SINGLE, EXPERT]),
    "offsets reversed": (entry(data_offsets=[100, 0]), [SINGLE, EXPERT, "byte range [100, 0]"]),
    "negative offset": (entry(data_offsets=[-1024, 0]), [SINGLE, EXPERT, "byte range"]),
    "missing offsets": (
        lambda f: f.header(lambda h: h[f"{EXPERT}.weight_packed"].pop("data_offsets") and None),
        [SINGLE, EXPERT, "other keys"],
    ),
    "overlapping data": (lambda f: f.header(shift_offsets), [SINGLE, "overlaps the tensor before it"]),
    "a gap in the data": (
        lambda f: f.header(lambda h: h.pop("model.layers.0.self_attn.o_proj.weight") and None),
        [SINGLE, "follows a gap"],
    ),
    "line breaks in a name": (
        lambda f: f.header(lambda h: h.update({"evil\n\x1b[2Jname": h.pop(f"{EXPERT}.weight_packed")})),
        [SINGLE, EXPERT, r"evil\n\x1b[2Jname"],
    ),
    # the tensors
    "missing scale": (drop(f"{EXPERT}.weight_scale"), [SINGLE, "1 missing", f"{EXPERT}.weight_scale"]),
    "missing shape": (drop(f"{EXPERT}.weight_shape"), [SINGLE, "1 missing", f"{EXPERT}.weight_shape"]),
    "missing words": (drop(f"{EXPERT}.weight_packed"), [SINGLE, "1 missing", f"{EXPERT}.weight_packed"]),
    "missing bias": (drop(GATE), [SINGLE, "1 missing", GATE]),
    "transposed scale": (
        tensor(f"{EXPERT}.weight_scale", lambda scale: np.ascontiguousarray(scale.T)),
        [SINGLE, f"{EXPERT}.weight_scale", "is [1, 64], expected [64, 1]"],
    ),
    "transposed words": (
        tensor(f"{EXPERT}.weight_packed", lambda words: np.ascontiguousarray(words.T)),
        [SINGLE, f"{EXPERT}.weight_packed", "is [4, 64], expected [64, 4]"],
    ),
    "words as bytes": (
        tensor(f"{EXPERT}.weight_packed", lambda words: words.view(np.uint8)),
        [SINGLE, f"{EXPERT}.weight_packed", "is [64, 16], expected [64, 4]"],
    ),
    "scales in float16": (
        tensor(f"{EXPERT}.weight_scale", lambda scale: scale.astype(np.float16)),
        [SINGLE, f"{EXPERT}.weight_scale", "is F16, expected BF16"],
    ),
    "bias in bfloat16": (
        tensor(GATE, lambda bias: bias.astype(ml_dtypes.bfloat16)),
        [SINGLE, GATE, "is BF16, expected F32"],
    ),
    "weight in float64": (
        tensor("lm_head.weight", lambda weight: weight.astype(np.float64)),
        [SINGLE, "lm_head.weight", "is F64, expected BF16 or F32"],
    ),
    "short vocabulary": (
        tensor("model.embed_tokens.weight", lambda weight: weight[:-1].copy()),
        [SINGLE, "model.embed_tokens.weight", "is [63, 64], expected [64, 64]"],
    ),
    "weight_shape transposed": (
        tensor(f"{EXPERT}.weight_shape", lambda shape: shape[::-1].copy()),
        [SINGLE, f"{EXPERT}.weight_shape", "says [32, 64], config.json [64, 32]"],
    ),
    "weight_shape negative": (
        tensor(f"{EXPERT}.weight_shape", lambda shape: -shape),
        [SINGLE, f"{EXPERT}.weight_shape", "says [-64, -32]"],
    ),
    "an unplanned layer": (
        also("model.layers.3.input_layernorm.weight", "model.norm.weight"),
        [SINGLE, "1 unexpected", "model.layers.3.input_layernorm.weight"],
    ),
    "a zero point": (
        also(f"{EXPERT}.weight_zero_point", f"{EXPERT}.weight_scale"),
        [SINGLE, "1 unexpected", f"{EXPERT}.weight_zero_point"],
    ),
    "one tensor under two prefixes": (
        also("language_model.model.norm.weight", "model.norm.weight"),
        [SINGLE, "language_model.model.norm.weight", "the same tensor"],
    ),
    "a misspelt name": (
        rename("model.norm.weight", "model.norms.weight"),
        [SINGLE, "1 missing", "model.norm.weight", "1 unexpected", "model.norms.weight"],
    ),
    # the config
    "another order of nibbles": (quantization({"pack_order": "high_first"}), ["config.json", "pack_order"]),
    "a packing of columns": (quantization({"packed_dim": 0}), ["config.json", "packed_dim"]),
    "asymmetric": (quantization({"symmetric": False}), ["config.json", "symmetric"]),
    "8 bit": (quantization({"num_bits": 8}), ["config.json", "num_bits"]),
    "channel scales": (quantization({"strategy": "channel"}), ["config.json", "strategy"]),
    "activation order": (quantization({"actorder": "group"}), ["config.json", "actorder"]),
    "another format": (quantization({"format": "marlin-24"}, "top"), ["config.json", "format", "marlin-24"]),
    "another format of the group": (quantization({"format": "int-quantized"}, "group"), ["config.json", "format"]),
    "rotated weights": (quantization({"transform_config": {"a": 1}}, "top"), ["config.json", "transform_config"]),
    "another group size": (
        quantization({"group_size": 16}),
        [SINGLE, "model.layers.1.mlp.experts.0.down_proj.weight_scale", "is [64, 1], expected [64, 2]"],
    ),
    "group size 0": (quantization({"group_size": 0}), ["config.json", "group_size"]),
    "another width": (config(moe_intermediate_size=64), [SINGLE, "expected [64, 8]"]),
    "fewer experts": (config(n_routed_experts=3), [SINGLE, "unexpected", "model.layers.1.mlp.experts.3"]),
    "more layers": (config(num_hidden_layers=4), [SINGLE, "missing", "model.layers.3."]),
    "bf16 experts promised": (
        lambda f: f.json("config.json", lambda values: values.pop("quantization_config")),
        [SINGLE, "missing", "model.layers.1.mlp.experts.0.down_proj.weight", "unexpected"],
    ),
    "config.json damaged": (lambda f: (f.path / "config.json").write_text('{"a'), ["config.json", "read as JSON"]),
    "config.json empty": (lambda f: (f.path / "config.json").write_text(""), ["config.json", "read as JSON"]),
    "config.json absent": (lambda f: (f.path / "config.json").unlink(), ["config.json", "does not exist"]),
    "config.json nested without end": (
        lambda f: (f.path / "config.json").write_text('{"a":' + "[" * 100_000),
        ["config.json", "read as JSON"],
    ),
    "config.json a pipe": (
        lambda f: ((f.path / "config.json").unlink(), os.mkfifo(f.path / "config.json")),
        ["config.json", "regular file"],
    ),
}


@pytest.mark.parametrize("fault", SINGLE_FILE)
def test_single_file(sound, tmp_path, no_device, fault):
    damage, words = SINGLE_FILE[fault]
    shutil.copytree(sound / "single", tmp_path / "folder")
    damage(Folder(tmp_path / "folder"))
    refused(lambda: load_target(tmp_path / "folder", BF16), *words)


def index(change):
    return lambda folder: folder.json(INDEX, lambda values: change(values["weight_map"]))


def redirect(name, to):
    return index(lambda weight_map: weight_map.update({name: to}))


NORM = "language_model.model.norm.weight"


def move_to_other_shard(folder):
    """The tensor is where it was, but the index says another file."""
    other = next(shard.name for shard in folder.shards if shard != folder.shard_of(NORM))
    redirect(NORM, other)(folder)


def truncate_two(folder):
    cut(folder.shards[1], -8)
    cut(folder.shards[3], 4)


def loop_third_shard(folder):
    shard = folder.shards[2]
    shard.unlink()
    shard.symlink_to(shard.name)


def swap_two(folder):
    a, b = folder.shards[0], folder.shards[1]
    a.rename(folder.path / "tmp")
    b.rename(a)
    (folder.path / "tmp").rename(b)


SHARDED = {
    "a shard is missing": (lambda f: f.shards[2].unlink(), ["model-00003-of", "it lacks 1 of"]),
    "two shards are truncated": (truncate_two, ["model-00002-of", "8 bytes are missing", "model-00004-of", "4 bytes"]),
    "a shard is a symlink loop": (
        lambda f: (
            (f.shards[2].unlink(), (f.path / "x").symlink_to("x"), "")
            and (f.path / f"model-00003-of-{len(f.shards) + 1:06d}.safetensors").symlink_to("x")
        ),
        ["model-00003-of", "symbolic links"],
    ),
    "two shards are exchanged": (swap_two, [INDEX, "tensors that their shards lack", "model-00001-of"]),
    "stale index: another file": (move_to_other_shard, [INDEX, NORM, "their shards lack"]),
    "stale index: a tensor more": (
        lambda f: redirect("language_model.model.layers.9.extra", f.shards[0].name)(f),
        [INDEX, "language_model.model.layers.9.extra", "their shards lack"],
    ),
    "stale index: a tensor less": (
        index(lambda weight_map: weight_map.pop(NORM)),
        [INDEX, "1 missing", "model.norm.weight"],
    ),
    "index points to the parent": (redirect(NORM, "../sharded/x.safetensors"), [INDEX, "outside its folder", "../"]),
    "index points to the root": (redirect(NORM, "/etc/passwd"), [INDEX, "outside its folder", "/etc/passwd"]),
    "index points to nothing": (redirect(NORM, ""), [INDEX, "outside its folder"]),
    "index points to itself": (redirect(NORM, INDEX), [INDEX, "claims a header of"]),
    "index names an absent file": (redirect(NORM, "model-99999.safetensors"), ["model-99999.safetensors", "lacks 1"]),
    "index names a number": (redirect(NORM, 3), [INDEX, "no readable weight_map"]),
    "index is empty": (lambda f: (f.path / INDEX).write_text(""), [INDEX, "no readable weight_map"]),
    "index is cut": (lambda f: cut(f.path / INDEX, 900), [INDEX, "no readable weight_map"]),
    "index without tensors": (index(lambda weight_map: weight_map.clear()), [INDEX, "missing"]),
    "index names a tensor twice": (
        lambda f: (f.path / INDEX).write_text('{"weight_map": {"a": "b", "a": "c"}}'),
        [INDEX, "a is there twice"],
    ),
    "index nested without end": (
        lambda f: (f.path / INDEX).write_text('{"weight_map":' + "[" * 100_000),
        [INDEX, "no readable weight_map"],
    ),
    "index is a folder": (
        lambda f: ((f.path / INDEX).unlink(), (f.path / INDEX).mkdir()),
        [INDEX, "not a regular file"],
    ),
    "index is a symlink loop": (
        lambda f: ((f.path / INDEX).unlink(), (f.path / INDEX).symlink_to(INDEX)),
        [INDEX, "no readable weight_map"],
    ),
    "a damaged shard and a missing tensor": (
        lambda f: (cut(f.shards[-1], -2), index(lambda weight_map: weight_map.pop("language_model.lm_head.weight"))(f)),
        ["2 bytes are missing", "1 missing", "lm_head.weight"],
    ),
}


@pytest.mark.parametrize("fault", SHARDED)
def test_sharded(sound, tmp_path, no_device, fault):
    damage, words = SHARDED[fault]
    shutil.copytree(sound / "sharded", tmp_path / "folder")
    damage(Folder(tmp_path / "folder"))
    refused(lambda: load_target(tmp_path / "folder", BF16), *words)


def poke(name, value, where=(0, 0)):
    def change(array):
        array = array.copy()
        array[where[: array.ndim]] = value
        return array

    return tensor(name, change)


NAN, INF = float("nan"), float("inf")
VALUES = {
    "NaN scale": (poke(f"{EXPERT}.weight_scale", NAN, (5, 0)), [f"{EXPERT}.weight_scale", "1 scales", "nan"]),
    "infinite scale": (poke(f"{EXPERT}.weight_scale", INF), [f"{EXPERT}.weight_scale", "inf"]),
    "absurd scale": (poke(f"{EXPERT}.weight_scale", 1e30), [f"{EXPERT}.weight_scale", "1 scales"]),
    "negative scale": (poke(f"{EXPERT}.weight_scale", -0.01), [f"{EXPERT}.weight_scale", "negative"]),
    "NaN weight": (poke("model.layers.2.self_attn.o_proj.weight", NAN), ["2.self_attn.o_proj.weight", "NaN"]),
    "infinite norm": (poke("model.norm.weight", -INF), ["model.norm.weight", "infinite"]),
    "NaN bias": (poke(GATE, NAN), [GATE, "NaN"]),
    "scales of noise": (
        tensor(
            f"{EXPERT}.weight_scale",
            lambda scale: (
                np.random.default_rng(0).bytes(scale.nbytes)
                and np.frombuffer(np.random.default_rng(0).bytes(scale.nbytes), scale.dtype).reshape(scale.shape).copy()
            ),
        ),
        [f"{EXPERT}.weight_scale", "scales"],
    ),
}


@pytest.mark.parametrize("fault", VALUES)
def test_values(sound, tmp_path, fault):
    damage, words = VALUES[fault]
    shutil.copytree(sound / "single", tmp_path / "folder")
    damage(Folder(tmp_path / "folder"))
    refused(lambda: load_target(tmp_path / "folder", BF16), SINGLE, *words)


def test_damaged_values_are_listed_together(sound, tmp_path):
    shutil.copytree(sound / "single", tmp_path / "folder")
    names = [f"model.layers.1.mlp.experts.{i}.up_proj.weight_scale" for i in (0, 3)]
    for name in names:
        poke(name, NAN)(Folder(tmp_path / "folder"))
    refused(lambda: load_target(tmp_path / "folder", BF16), *names)


@pytest.mark.parametrize("copied", [False, True], ids=["in place", "in chunks"])
@pytest.mark.parametrize("folder", ["single", "sharded"])
@pytest.mark.parametrize("read", [1, 20, 60], ids="at read {}".format)
def test_a_file_that_shrinks_while_it_is_read(sound, tmp_path, monkeypatch, folder, read, copied):
    """After its header was read: among the small tensors that config.json tells, at the first weights and later."""
    shutil.copytree(sound / folder, tmp_path / "folder")
    monkeypatch.setattr(stream, "_in_host_memory", lambda sharding: not copied)
    monkeypatch.setattr(stream, "STAGING_BYTES", 8_000)
    calls, read_into = itertools.count(1), TensorFolder.read_into

    def shrink(self, name, out, offset=0):
        if next(calls) == read:
            for file in Folder(tmp_path / "folder").shards:
                os.truncate(file, file.stat().st_size // 8)
        read_into(self, name, out, offset)

    monkeypatch.setattr(TensorFolder, "read_into", shrink)
    refused(lambda: load_target(tmp_path / "folder", BF16), ".safetensors: ", "bytes of", "became shorter")


def test_a_mesh_that_cuts_a_scale_group(sound, no_device):
    """32 columns of down_proj are one group: two devices cannot share it."""
    mesh = msgspec.structs.replace(BF16, mesh=MeshConfig(tensor=2))
    refused(lambda: load_target(sound / "single", mesh), "experts.down_proj", "group")


def drafter_config(**change):
    def edit(values):
        values.update(change)
        for key in [key for key, value in change.items() if value is ...]:
            del values[key]

    return lambda folder: folder.json("config.json", edit)


def dflash_config(**change):
    return lambda folder: folder.json("config.json", lambda values: values["dflash_config"].update(change))


def rope(**change):
    return lambda folder: folder.json("config.json", lambda values: values["rope_parameters"].update(change))


DRAFTERS = {
    "another target width": (drafter_config(hidden_size=128), ["hidden_size 128", "target.hidden_size = 64"]),
    "another vocabulary": (drafter_config(vocab_size=65), ["vocab_size 65", "target.vocab_size = 64"]),
    "another depth": (drafter_config(num_target_layers=61), ["num_hidden_layers 61", "target.num_hidden_layers = 3"]),
    "a tap beyond the target": (dflash_config(target_layer_ids=[0, 3]), ["target_layer_ids [3]"]),
    "a tap more": (dflash_config(target_layer_ids=[0, 1, 2]), [SINGLE, "fc.weight", "expected [64, 192]"]),
    "a mask beyond the vocabulary": (dflash_config(mask_token_id=64), ["mask_token_id=64"]),
    "an unknown key": (drafter_config(logit_softcap=30.0), ["config.json", "logit_softcap", "does not know"]),
    "an unknown key of dflash": (dflash_config(markov_heads=2), ["config.json", "dflash_config.markov_heads"]),
    "an unknown key of rope": (rope(low_freq_factor=4), ["config.json", "rope_parameters.low_freq_factor"]),
    "an unknown rope": (rope(rope_type="llama3"), ["config.json", "rope_type", "llama3"]),
    "two thetas": (drafter_config(rope_theta=10000.0), ["config.json", "rope_theta", "contradicts"]),
    "no theta": (lambda f: f.json("config.json", lambda v: v["rope_parameters"].pop("rope_theta")), ["rope_theta"]),
    "no window": (drafter_config(sliding_window=None), ["sliding_window"]),
    "no layer types": (drafter_config(layer_types=...), ["config.json", "layer_types is missing"]),
    "an unknown layer type": (drafter_config(layer_types=["chunked", "full_attention"]), ["layer_types", "chunked"]),
    "is_causal as text": (drafter_config(is_causal="no"), ["config.json", "is_causal"]),
    "attention with bias": (drafter_config(attention_bias=True), ["config.json", "attention_bias"]),
    "an lm_head of its own": (
        lambda f: f.tensors(lambda tensors: tensors.update({"lm_head.weight": np.zeros((64, 64), np.float32)})),
        [SINGLE, "1 unexpected", "lm_head.weight"],
    ),
    "a missing k_norm": (drop("layers.1.self_attn.k_norm.weight"), [SINGLE, "layers.1.self_attn.k_norm.weight"]),
    "a truncated file": (lambda f: cut(f.path / SINGLE, -16), [SINGLE, "16 bytes are missing"]),
    "another architecture": (drafter_config(architectures=["EagleModel"]), ["config.json", "architectures"]),
}


@pytest.mark.parametrize("fault", DRAFTERS)
def test_drafter(sound, tmp_path, no_device, fault):
    damage, words = DRAFTERS[fault]
    shutil.copytree(sound / "drafter", tmp_path / "folder")
    damage(Folder(tmp_path / "folder"))
    refused(lambda: load_drafter(tmp_path / "folder", BF16, TARGET), *words)


def test_sound_folders_load(sound):
    """The faults above are all that is wrong with their folders."""
    load_target(sound / "single", BF16)
    load_target(sound / "sharded", BF16)
    load_drafter(sound / "drafter", BF16, TARGET)


@pytest.mark.parametrize(
    "change, runs",
    [
        ({"num_hidden_layers": 4}, True),
        ({"num_hidden_layers": 2}, False),
        ({"vocab_size": 128}, True),
        ({"vocab_size": 59}, False),
        ({"hidden_size": 128}, False),
    ],
)
def test_a_mismatch_may_be_allowed_where_it_can_run(sound, change, runs):
    other = msgspec.structs.replace(TARGET, **change)
    message = refused(lambda: load_drafter(sound / "drafter", BF16, other), next(iter(change)))
    assert message.endswith("(or allow the mismatch)") == runs
    if runs:
        assert load_drafter(sound / "drafter", BF16, other, allow_mismatch=True).mismatch_allowed
    else:
        refused(lambda: load_drafter(sound / "drafter", BF16, other, allow_mismatch=True), next(iter(change)))


@pytest.mark.parametrize(
    "drafter, target, fits",
    [
        ("Kimi-K2.6-DFlash", "Kimi-K2.6", True),
        ("Kimi-K2.5-DFlash", "Kimi-K2.6", False),
        ("Kimi-K2.6-DFlash-tmp", "Kimi-K2.5", False),
        ("Kimi-K2.5-DFlash", "my-model", True),
        ("drafter", "Kimi-K2.6", True),
        (
            "models--z-lab--Kimi-K2.5-DFlash/snapshots/" + "a" * 40,
            "models--moonshotai--Kimi-K2.6/snapshots/main",
            False,
        ),
    ],
)
def test_drafters_of_another_release_are_told_by_name(sound, tmp_path, drafter, target, fits):
    shutil.copytree(sound / "drafter", tmp_path / drafter)

    def load(**options):
        return load_drafter(tmp_path / drafter, BF16, TARGET, target_path=tmp_path / target, **options)

    if fits:
        load()
    else:
        refused(load, re.search(r"Kimi-K2\.\d", drafter)[0], "allow the mismatch")
    load(allow_mismatch=True)
