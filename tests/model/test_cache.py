"""Appending and committing rows: order, bounds, overlap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdjax.model.cache import KVCache, append, commit
from tests.model.small import CONFIG


def numbered(slots=2, rows=24, width=3):
    return jnp.arange(slots * rows * width, dtype=jnp.float32).reshape(slots, rows, width)


def test_capacity_is_rounded_up_and_tree_rows_are_added():
    cache = KVCache.empty(CONFIG, slots=3, capacity=65, tree_rows=9, dtype="bfloat16")
    assert [layer.shape for layer in cache.latent] == [(3, 137, CONFIG.latent_dim)] * CONFIG.num_hidden_layers
    assert cache.latent[0].dtype == jnp.bfloat16
    assert cache.lengths.tolist() == [0, 0, 0]


@pytest.mark.parametrize("start", [[0, 5], [16, 17], [23, 16], [24, 30], [10, 23]])
def test_append_drops_rows_beyond_the_end_and_never_shifts(start):
    layer, new = numbered(), -jnp.ones((2, 8, 3)) * jnp.arange(1, 9, dtype=jnp.float32)[None, :, None]
    expected = np.array(layer)
    for s in range(2):
        for i in range(8):
            if start[s] + i < 24:
                expected[s, start[s] + i] = new[s, i]
    starts = jnp.asarray(start, jnp.int32)
    np.testing.assert_array_equal(append(layer, new, starts), expected)
    np.testing.assert_array_equal(jax.jit(append)(layer, new, starts), expected)


def test_append_vmapped_equals_looped():
    layers = numbered(slots=6).reshape(3, 2, 24, 3)
    new = -jnp.ones((3, 2, 8, 3))
    starts = jnp.asarray([[0, 20], [23, 3], [17, 16]], jnp.int32)
    looped = jnp.stack([append(layers[i], new[i], starts[i]) for i in range(3)])
    np.testing.assert_array_equal(jax.vmap(append)(layers, new, starts), looped)


@pytest.mark.parametrize("accepted", [[0, 2, 3, 5], [0, 1, 2, 3], [0, 4, 5, 9], [0, 9, 1, 1]])
@pytest.mark.parametrize("n", [[4, 4], [3, 1], [0, 2]])
def test_commit_equals_a_copy_through_a_temporary(accepted, n):
    cache = KVCache((numbered(), numbered() * 2), jnp.asarray([5, 11], jnp.int32))
    expected = [np.array(layer) for layer in cache.latent]
    for layer in expected:
        before = layer.copy()
        for s, start in enumerate([5, 11]):
            for j in range(n[s]):
                layer[s, start + j] = before[s, start + accepted[j]]
    got = jax.jit(commit)(cache, jnp.asarray([accepted] * 2, jnp.int32), jnp.asarray(n, jnp.int32))
    for layer, want in zip(got.latent, expected, strict=True):
        np.testing.assert_array_equal(layer, want)
    assert got.lengths.tolist() == [5 + n[0], 11 + n[1]]


def test_identity_commit_moves_nothing():
    cache = KVCache((numbered(),), jnp.asarray([5, 11], jnp.int32))
    got = commit(cache, jnp.asarray([[0, 1, 2, 3]] * 2, jnp.int32), jnp.asarray([4, 4], jnp.int32))
    np.testing.assert_array_equal(got.latent[0], cache.latent[0])
