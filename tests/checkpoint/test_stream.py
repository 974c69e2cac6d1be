"""Weights on meshes: every device gets its own part, every byte is read once, and host memory stays bounded."""

import tracemalloc

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from kdjax.checkpoint import load_target, save_target, stream
from kdjax.checkpoint.files import TensorFolder
from kdjax.checkpoint.layout import target_leaves
from kdjax.checkpoint.params import expected_tensors
from kdjax.checkpoint.progress import Monitor
from kdjax.config import Int4Config
from kdjax.errors import KdjaxError
from kdjax.model.runtime import Runtime
from tests.checkpoint.random_models import TARGET, random_target

BF16 = Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16")
EXACT = Runtime(compute_dtype="float32", cache_dtype="float32")
EXPANDED = msgspec.structs.replace(EXACT, expert_weights="dequantized")
CONFIG = msgspec.structs.replace(
    TARGET,
    num_attention_heads=4,
    moe_intermediate_size=64,
    experts_int4=Int4Config(group_size=16),
    num_hidden_layers=2,
)
LEAVES = list(target_leaves(CONFIG, lambda module: CONFIG.experts_int4))
PARAMS = random_target(CONFIG)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    save_target(folder, CONFIG, PARAMS, wrapper=True, max_shard_bytes=40_000)
    return folder


def spec(path: str) -> P:
    """Rows of projections in, columns of projections out, experts over their own axis."""
    if ".experts." in path:
        return P("expert", None, "model") if "down_proj" in path else P("expert", "model")
    if any(name in path for name in ("o_proj", "down_proj")):
        return P(None, ("expert", "model"))
    if any(name in path for name in ("q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")):
        return P(("expert", "model"))
    return P()


def on_mesh(expert: int, model: int, of=spec):
    mesh = jax.make_mesh(
        (expert, model), ("expert", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[: expert * model]
    )
    tree = jax.tree_util.tree_map_with_path(
        lambda path, _: NamedSharding(mesh, of(jax.tree_util.keystr(path, simple=True, separator="."))), PARAMS
    )
    return lambda config: tree


@pytest.fixture(params=["in place", "in chunks"])
def chunked(request, monkeypatch):
    """Accelerators are filled by chunks; here CPU devices stand for them."""
    if request.param == "in chunks":
        monkeypatch.setattr(stream, "_in_host_memory", lambda sharding: False)
        monkeypatch.setattr(stream, "STAGING_BYTES", 8_000)
    monkeypatch.setattr(stream, "READ_BYTES", 3_000)
    return request.param


@pytest.mark.parametrize(
    "runtime, expert, model",
    [(BF16, 1, 4), (BF16, 4, 1), (BF16, 2, 2), (EXACT, 2, 2), (EXPANDED, 2, 2)],
    ids=["model", "expert", "both", "float32", "dequantized"],
)
def test_every_device_gets_its_own_part(saved, chunked, runtime, expert, model):
    whole = load_target(saved, runtime).params
    placed = on_mesh(expert, model)
    split = load_target(saved, runtime, shardings=placed).params
    assert jax.tree.structure(split) == jax.tree.structure(whole)
    for (path, ours), theirs in zip(jax.tree_util.tree_leaves_with_path(split), jax.tree.leaves(whole), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs), err_msg=name)
        wanted = NamedSharding(ours.sharding.mesh, spec(name))
        assert ours.sharding.is_equivalent_to(wanted, ours.ndim), name
        assert len(ours.addressable_shards) == expert * model


def test_every_byte_is_read_once_whatever_the_mesh(saved, chunked, monkeypatch):
    asked = []
    read_into = TensorFolder.read_into

    def counting(self, name, out, offset=0):
        if not name.endswith("weight_shape"):
            asked.append((name, offset, out.nbytes))
        read_into(self, name, out, offset)

    monkeypatch.setattr(TensorFolder, "read_into", counting)
    monitor = Monitor()
    load_target(saved, BF16, shardings=on_mesh(2, 2), monitor=monitor)
    sizes = {
        name: stored.nbytes for name, stored in expected_tensors(LEAVES).items() if not name.endswith("weight_shape")
    }
    assert {name for name, _, _ in asked} == sizes.keys()
    for name, size in sizes.items():
        runs = sorted((offset, nbytes) for other, offset, nbytes in asked if other == name)
        assert [offset for offset, _ in runs] == [sum(n for _, n in runs[:i]) for i in range(len(runs))]
        assert sum(nbytes for _, nbytes in runs) == size
    assert monitor.done == monitor.total == sum(sizes.values())
    load_target(saved, BF16, monitor=monitor)
    assert monitor.done == monitor.total == sum(sizes.values())


def test_seconds_of_a_load_add_up_by_their_kind(monkeypatch):
    monitor = Monitor()
    with monkeypatch.context() as patch:
        patch.setattr("time.perf_counter", iter(range(99)).__next__)
        for kind in (monitor.reading, monitor.transferring, monitor.arranging, monitor.reading, monitor.transferring):
            with kind():
                pass
        with monitor.reading():
            pass
    assert (monitor.read_s, monitor.transfer_s, monitor.layout_s) == (3, 2, 1)


@pytest.mark.parametrize("of", [P(), P("model"), P(None, "model")], ids=["whole", "rows", "columns"])
def test_staging_memory_is_bounded(tmp_path, monkeypatch, of):
    """Numpy reports its buffers to tracemalloc; XLA's, which stand for device memory here, are not counted."""
    weight = np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    monkeypatch.setattr(stream, "_in_host_memory", lambda sharding: False)
    monkeypatch.setattr(stream, "STAGING_BYTES", 1 << 20)
    monkeypatch.setattr(stream, "READ_BYTES", 1 << 16)
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,), devices=jax.devices()[:4])
    float32 = np.dtype(np.float32)
    part = stream.Part(("w",), False, weight.shape, float32, float32, NamedSharding(mesh, of))
    tracemalloc.start()
    (made,) = stream.stream(TensorFolder(tmp_path), [part], Monitor())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 20 < weight.nbytes // 5
    np.testing.assert_array_equal(np.asarray(made), weight)


@pytest.mark.parametrize("projection", ["down_proj", "up_proj"])
def test_a_scale_group_is_never_cut(saved, projection):
    """64 columns make 8 words but 4 groups of 16: each of 8 shards would hold one word and half a group."""

    def cut(path):
        return P(None, None, "model") if f".experts.{projection}" in path else P()

    with pytest.raises(KdjaxError, match=rf"layers.1.mlp.experts.0.{projection}.weight_scale .* cannot be cut evenly"):
        load_target(saved, BF16, shardings=on_mesh(1, 8, cut))


@pytest.mark.parametrize("apart", [P(None, None, "model"), P(None, "model")], ids=["columns", "rows"])
def test_scales_must_lie_with_their_weights(saved, apart):
    def cut(path):
        return apart if path.endswith(".experts.down_proj.weight.packed") else P()

    with pytest.raises(KdjaxError, match=r"0.down_proj.weight_packed would be cut .* a scale must lie where its group"):
        load_target(saved, BF16, shardings=on_mesh(1, 2, cut))


def test_all_uneven_cuts_are_listed(saved):
    with pytest.raises(KdjaxError) as error:
        load_target(saved, BF16, shardings=on_mesh(1, 8, lambda path: P("model")))
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight [36, 64] cannot be cut evenly" in str(error.value)
    assert "model.layers.1.mlp.gate.weight [4, 64] cannot be cut evenly" in str(error.value)
