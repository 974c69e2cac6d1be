"""Experts in the layout of the INT4 kernels on a mesh: what each device makes of its own part."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kdjax.checkpoint import load_target
from kdjax.config import MeshConfig
from kdjax.errors import KdjaxError
from kdjax.model import k2
from kdjax.model.cache import KVCache
from kdjax.model.runtime import Runtime
from kdjax.sharding import kv_cache_rules, make_mesh, partition, shardings, target_shardings, target_specs
from tests.sharding import own_case
from tests.sharding.splits import name
from tests.tolerances import MODEL_RELATIVE_BFLOAT16

KERNELS = Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16", backend="interpret")


@pytest.mark.parametrize(
    "mesh", [MeshConfig(expert=4), MeshConfig(tensor=2, expert=2), MeshConfig(sequence=2)], ids=name
)
def test_loaded_on_a_mesh_they_are_those_of_one_device(own, mesh):
    one = load_target(own.folder, KERNELS).params
    runtime, devices = msgspec.structs.replace(KERNELS, mesh=mesh), make_mesh(mesh)
    target = load_target(own.folder, runtime, shardings=lambda config: target_shardings(config, runtime, devices))
    specs = target_specs(target.params, target.config, mesh)
    tiles, expected = (p["layers"][1]["mlp"]["experts"]["tiles"] for p in (target.params, one))
    placed = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), target.params, shardings(specs, devices))
    assert all(jax.tree.leaves(placed))
    assert tiles.gate_up_words.addressable_shards[0].data.size * mesh.devices == expected.gate_up_words.size
    for mine, whole in zip(jax.tree.leaves(tiles), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, whole)


def test_a_mesh_of_kernels_computes_what_one_device_does_in_float32(own):
    """Each device's kernels see four of eight experts at half of their width. Wherever bfloat16 lets a token choose the
    same experts, which is nearly everywhere."""
    config, slots, q = own_case.MODEL, 8, 4
    tokens = np.arange(slots * q, dtype=np.int32).reshape(slots, q)
    positions = np.broadcast_to(np.arange(q, dtype=np.int32), tokens.shape)
    results = []
    exact = Runtime(compute_dtype="float32", cache_dtype="float32", backend="xla")
    for mesh, runtime in ((MeshConfig(), exact), (MeshConfig(tensor=2, expert=2), KERNELS)):
        runtime, devices = msgspec.structs.replace(runtime, mesh=mesh), make_mesh(mesh)
        params = load_target(
            own.folder, runtime, shardings=lambda c, r=runtime, d=devices: target_shardings(c, r, d)
        ).params
        cache = KVCache.empty(config, slots, 64, 8, runtime.cache_dtype)

        def forward(params, tokens, positions, cache, runtime=runtime):
            out = k2.forward(params, config, tokens, positions, cache, runtime=runtime)
            return out.hidden, jnp.stack(out.routing)

        specs = (target_specs(params, config, mesh), P(), P(), partition(cache, kv_cache_rules(mesh), mesh))
        spread = jax.shard_map(forward, mesh=devices, in_specs=specs, out_specs=P(), check_vma=False)
        args = jax.device_put((params, tokens, positions, cache), shardings(specs, devices))
        hidden, routing = jax.jit(spread)(*args)
        results.append((np.asarray(hidden, np.float32), np.sort(np.asarray(routing), axis=-1)))
    (expected, chosen), (hidden, routing) = results
    alike = np.all(routing == chosen, axis=(0, 3))
    assert np.mean(alike) >= 0.9
    alike = np.logical_and.accumulate(alike, axis=1)  # later tokens see one that chose others
    assert np.linalg.norm((hidden - expected)[alike]) / np.linalg.norm(expected[alike]) < MODEL_RELATIVE_BFLOAT16


def test_no_tile_is_cut():
    specs = target_specs(k2.abstract_params(own_case.MODEL, KERNELS), own_case.MODEL, MeshConfig(tensor=2))
    assert specs["layers"][1]["mlp"]["experts"]["tiles"].down_words == P(None, None, ("tensor",))
    with pytest.raises(KdjaxError, match=r"experts.tiles.\w+ .* cannot be cut into 4 parts .* which holds 2 tiles"):
        target_specs(k2.abstract_params(own_case.MODEL, KERNELS), own_case.MODEL, MeshConfig(tensor=4))
