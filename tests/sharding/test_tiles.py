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
from tests.tolerances import MODEL_BFLOAT16

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


def test_a_mesh_of_kernels_computes_what_one_device_does_in_xla(own):
    """Each device's kernels see four of eight experts at half of their width."""
    config, tokens = own_case.MODEL, np.asarray([own_case.PROMPTS[0]], np.int32)
    hidden = []
    for mesh, backend in ((MeshConfig(), "xla"), (MeshConfig(tensor=2, expert=2), "interpret")):
        runtime, devices = msgspec.structs.replace(KERNELS, mesh=mesh, backend=backend), make_mesh(mesh)
        params = load_target(
            own.folder, runtime, shardings=lambda c, r=runtime, d=devices: target_shardings(c, r, d)
        ).params
        cache = KVCache.empty(config, 1, 64, 8, "bfloat16")

        def forward(params, tokens, cache, runtime=runtime):
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            return k2.forward(params, config, tokens, positions, cache, runtime=runtime).hidden

        specs = (target_specs(params, config, mesh), P(), partition(cache, kv_cache_rules(mesh), mesh))
        spread = jax.shard_map(forward, mesh=devices, in_specs=specs, out_specs=P(), check_vma=False)
        args = jax.device_put((params, tokens, cache), shardings(specs, devices))
        hidden.append(np.asarray(jax.jit(spread)(*args), np.float32))
    MODEL_BFLOAT16.check(hidden[1], hidden[0])


def test_no_tile_is_cut():
    specs = target_specs(k2.abstract_params(own_case.MODEL, KERNELS), own_case.MODEL, MeshConfig(tensor=2))
    assert specs["layers"][1]["mlp"]["experts"]["tiles"].down_words == P(None, None, ("tensor",))
    with pytest.raises(KdjaxError, match=r"experts.tiles.\w+ .* cannot be cut into 4 parts .* which holds 2 tiles"):
        target_specs(k2.abstract_params(own_case.MODEL, KERNELS), own_case.MODEL, MeshConfig(tensor=4))
