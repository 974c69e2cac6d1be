"""The KV cache dealt out over devices against the whole one: attention, append and commit."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from kdjax.config import MeshConfig
from kdjax.errors import KdjaxError
from kdjax.model import cache as kv
from kdjax.model import sequence
from kdjax.model.cache import KVCache
from kdjax.model.runtime import Runtime
from pallas_kernels.tree_attention import tree_attention
from tests.model.small import CONFIG
from tests.tolerances import ATTENTION_BFLOAT16, ATTENTION_FLOAT32

PARTS, ROWS = 8, 1024
AXES = ("sequence",)
LENGTHS = jnp.asarray([0, 1, 63, 64, 130, 511, 512, 700, 1000], jnp.int32)
Q, HEADS, RANK, ROPE = 9, 16, 16, 8
RNG = np.random.default_rng(3)


def dealt(rows):
    """[slots, rows, width] in the order in which devices hold it."""
    blocks = rows.reshape(rows.shape[0], -1, PARTS, sequence.BLOCK, rows.shape[2])
    return jnp.swapaxes(blocks, 1, 2).reshape(rows.shape)


def on_eight(function, in_specs, out_specs):
    mesh = jax.make_mesh((PARTS,), AXES, axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def random_trees(slots):
    sees = np.broadcast_to(np.eye(Q, dtype=bool), (slots, Q, Q)).copy()
    for s in range(slots):
        for node in range(1, Q):
            sees[s, node] |= sees[s, RNG.integers(0, node)]
    return jnp.asarray(sees)


@pytest.mark.parametrize(
    ("tree", "backend", "dtype"),
    [(True, "xla", "float32"), (False, "xla", "bfloat16"), (True, "interpret", "float32")],
)
def test_attention_over_all_devices_is_attention_over_the_whole(tree, backend, dtype):
    slots = len(LENGTHS)
    latent, rope, rows = normal(slots, Q, HEADS, RANK), normal(slots, Q, HEADS, ROPE), normal(slots, ROWS, RANK + ROPE)
    latent, rope, rows = (x.astype(dtype) for x in (latent, rope, rows))
    ancestors = random_trees(slots) if tree else None

    def attend(latent, rope, rows, ancestors):
        own = sequence.own_ancestors(ancestors, LENGTHS, Q, AXES)
        own_lengths = sequence.own_lengths(LENGTHS, AXES)
        return sequence.attend(latent, rope, rows, own_lengths, own, AXES, scale=0.2, backend=backend, shared=None)

    heads, held = P(None, None, AXES), P(None, AXES)
    got = on_eight(attend, (heads, heads, held, P()), heads)(latent, rope, dealt(rows), ancestors)
    expected = tree_attention(latent, rope, rows, LENGTHS, ancestors, scale=0.2, backend="xla")
    tolerance = ATTENTION_FLOAT32 if dtype == "float32" else ATTENTION_BFLOAT16
    tolerance.check(got.astype(jnp.float32), expected.astype(jnp.float32))


def test_rows_are_appended_and_committed_where_they_belong():
    """Trees across block borders, paths that move rows to another device, and rows beyond the end."""
    slots, n = len(LENGTHS), 4
    config = msgspec.structs.replace(CONFIG, kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
    lengths = LENGTHS.at[-1].set(ROWS - 5)
    layers = tuple(normal(slots, ROWS, config.latent_dim) for _ in range(2))
    new = normal(slots, Q, config.latent_dim)
    paths = np.sort(np.stack([RNG.choice(np.arange(1, Q), n - 1, replace=False) for _ in range(slots)]), axis=1)
    accepted = jnp.asarray(np.concatenate([np.zeros((slots, 1)), paths], axis=1), jnp.int32)
    n_accepted = jnp.asarray(RNG.integers(0, n + 1, slots), jnp.int32).at[-1].set(2)

    def step(latent, axes=()):
        cache = KVCache(tuple(kv.append(layer, new, lengths, axes) for layer in latent), lengths)
        return kv.commit(cache, accepted, n_accepted, axes).latent

    whole = step(layers)
    got = on_eight(lambda latent: step(latent, AXES), (P(None, AXES),), P(None, AXES))(tuple(map(dealt, layers)))
    for mine, expected in zip(got, whole, strict=True):
        np.testing.assert_array_equal(mine, dealt(expected))
    assert np.abs(np.asarray(whole[0] - layers[0])).max() > 0.1


def test_every_device_gets_whole_blocks():
    assert KVCache.empty(CONFIG, 1, 900, 9, "float32", PARTS).rows == 1024
    assert KVCache.empty(CONFIG, 1, 1024, 9, "float32", PARTS).rows == 1536
    with pytest.raises(KdjaxError, match="mla='materialised' reads the whole cache"):
        Runtime(compute_dtype="float32", cache_dtype="float32", mla="materialised", mesh=MeshConfig(sequence=2))
