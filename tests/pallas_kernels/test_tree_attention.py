"""One suite for every backend of tree attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import merge, merge_over, reference, tree_attention, tree_attention_partial
from tests.pallas_kernels.backends import BACKENDS
from tests.tolerances import ATTENTION_BFLOAT16, ATTENTION_FLOAT32

HEADS, RANK, ROPE, SCALE = 3, 32, 8, 0.15


def inputs(rng, slots, q, rows, dtype=jnp.float32):
    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return normal(slots, q, HEADS, RANK), normal(slots, q, HEADS, ROPE), normal(slots, rows, RANK + ROPE)


def random_tree(rng, q):
    """A random tree's ancestor mask, parents before children."""
    mask = np.eye(q, dtype=bool)
    for i in range(1, q):
        mask[i] |= mask[rng.integers(0, i)]
    return mask


run = functools.partial(jax.jit, static_argnames=("backend", "scale"))(tree_attention)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["chain", "trees"])
@pytest.mark.parametrize(
    "q,rows,lengths",
    [
        (1, 64, [0, 63]),
        (7, 70, [5, 63]),
        (17, 600, [0, 256]),
        (33, 600, [511, 567]),
        (5, 1000, [257, 995]),
    ],
)
def test_matches_reference(backend, mask, q, rows, lengths):
    """Empty, short, block-aligned and full prefixes; the last two put a tree at the very end of the cache."""
    rng = np.random.default_rng(q + rows)
    lengths = jnp.asarray(lengths, jnp.int32)
    q_latent, q_rope, cache = inputs(rng, 2, q, rows)
    ancestors = None if mask == "chain" else jnp.asarray(np.stack([random_tree(rng, q) for _ in range(2)]))
    got = run(q_latent, q_rope, cache, lengths, ancestors, scale=SCALE, backend=backend)
    expected = reference(q_latent, q_rope, cache, lengths, ancestors, scale=SCALE)
    ATTENTION_FLOAT32.check(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_cache_and_queries(backend):
    rng = np.random.default_rng(0)
    q_latent, q_rope, cache = inputs(rng, 2, 9, 400, jnp.bfloat16)
    lengths = jnp.asarray([40, 391], jnp.int32)
    got = run(q_latent, q_rope, cache, lengths, None, scale=SCALE, backend=backend)
    assert got.dtype == jnp.bfloat16
    ATTENTION_BFLOAT16.check(
        np.asarray(got, np.float32), reference(q_latent, q_rope, cache, lengths, None, scale=SCALE)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_not_visible_have_no_influence(backend):
    """A tree of 40 nodes: values 1e4 in every non-ancestor, in stale rows and in another slot's rows."""
    rng = np.random.default_rng(2)
    q, rows = 40, 400
    q_latent, q_rope, cache = inputs(rng, 2, q, rows)
    lengths = jnp.asarray([300, 12], jnp.int32)
    masks = np.stack([random_tree(rng, q) for _ in range(2)])
    clean = run(q_latent, q_rope, cache, lengths, jnp.asarray(masks), scale=SCALE, backend=backend)
    for slot, start in enumerate([300, 12]):
        for node in (0, 7, 23, 39):
            poisoned = np.full_like(cache, 1e4)
            poisoned[slot] = cache[slot]
            hidden = [start + j for j in range(q) if not masks[slot, node, j]]
            poisoned[slot, hidden] = 1e4
            poisoned[slot, start + q :] = 1e4
            got = run(
                q_latent, q_rope, jnp.asarray(poisoned), lengths, jnp.asarray(masks), scale=SCALE, backend=backend
            )
            np.testing.assert_array_equal(got[slot, node], clean[slot, node])


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_ancestor_and_committed_row_matters(backend):
    rng = np.random.default_rng(4)
    q, rows, start = 6, 300, 280
    q_latent, q_rope, cache = inputs(rng, 1, q, rows)
    mask = random_tree(rng, q)
    lengths = jnp.asarray([start], jnp.int32)
    clean = run(q_latent, q_rope, cache, lengths, jnp.asarray(mask)[None], scale=SCALE, backend=backend)
    for row in [0, 255, 256, start - 1] + [start + j for j in range(q)]:
        got = run(
            q_latent, q_rope, cache.at[0, row].add(3.0), lengths, jnp.asarray(mask)[None], scale=SCALE, backend=backend
        )
        changed = np.abs(np.asarray(got - clean)).max(axis=(0, 2, 3)) > 1e-4
        expected = np.ones(q, bool) if row < start else mask[:, row - start]
        np.testing.assert_array_equal(changed, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_siblings_swapped_give_swapped_outputs(backend):
    rng = np.random.default_rng(5)
    q_latent, q_rope, cache = inputs(rng, 1, 3, 64)
    mask = jnp.asarray([[[True, False, False], [True, True, False], [True, False, True]]])
    lengths, order = jnp.asarray([20], jnp.int32), jnp.asarray([0, 2, 1])
    clean = run(q_latent, q_rope, cache, lengths, mask, scale=SCALE, backend=backend)
    rows = cache.at[0, 20 + jnp.arange(3)].set(cache[0, 20 + order])
    swapped = run(q_latent[:, order], q_rope[:, order], rows, lengths, mask, scale=SCALE, backend=backend)
    ATTENTION_FLOAT32.check(swapped, clean[:, order])


@pytest.mark.parametrize("backend", BACKENDS)
def test_work_is_bounded_by_the_live_prefix(backend):
    """NaN beyond the blocks in use would reach the result if those rows were read and merely masked."""
    rng = np.random.default_rng(6)
    q_latent, q_rope, cache = inputs(rng, 1, 2, 2000)
    got = run(
        q_latent,
        q_rope,
        cache.at[:, 600:].set(jnp.nan),
        jnp.asarray([300], jnp.int32),
        None,
        scale=SCALE,
        backend=backend,
    )
    assert np.isfinite(got).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_that_sees_nothing_gets_zeros(backend):
    rng = np.random.default_rng(8)
    q_latent, q_rope, cache = inputs(rng, 1, 2, 64)
    mask = jnp.asarray([[[True, False], [False, False]]])
    got = run(q_latent, q_rope, cache, jnp.zeros(1, jnp.int32), mask, scale=SCALE, backend=backend)
    np.testing.assert_array_equal(got[0, 1], np.zeros((HEADS, RANK)))
    assert np.abs(got[0, 0]).max() > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_a_sharded_cache_merge_to_the_whole(backend):
    """Three shards of 64 rows: wholly committed, holding most of the tree, holding its end; one slot ends before."""
    rng = np.random.default_rng(9)
    q_latent, q_rope, cache = inputs(rng, 2, 9, 192)
    lengths = jnp.asarray([121, 30], jnp.int32)
    mask = jnp.asarray(np.stack([random_tree(rng, 9) for _ in range(2)]))
    partial = functools.partial(jax.jit, static_argnames=("backend", "scale"))(tree_attention_partial)
    parts = [
        partial(q_latent, q_rope, cache[:, at : at + 64], lengths - at, mask, scale=SCALE, backend=backend)
        for at in (0, 64, 128)
    ]
    outs, lses = (jnp.stack(x) for x in zip(*parts, strict=True))
    np.testing.assert_array_equal(np.isfinite(lses[2, 0, :, 0]), mask[0, :, 128 - 121 :].any(-1))
    assert np.isneginf(lses[2, 1]).all()
    whole, lse = partial(q_latent, q_rope, cache, lengths, mask, scale=SCALE, backend=backend)
    on_each = jax.vmap(functools.partial(merge_over, "shard"), axis_name="shard")(outs, lses)
    for out, joined in (merge(outs, lses), (on_each[0][2], on_each[1][2])):
        ATTENTION_FLOAT32.check(out, whole)
        ATTENTION_FLOAT32.check(joined, lse)


def test_unsupported_backend_is_named():
    rng = np.random.default_rng(0)
    with pytest.raises(NotImplementedError, match="backend='cudnn'.*xla"):
        tree_attention(*inputs(rng, 1, 2, 64), jnp.zeros(1, jnp.int32), None, scale=SCALE, backend="cudnn")
