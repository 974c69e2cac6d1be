"""Tree attention compiled for this GPU: fresh random inputs, ragged streams, outputs that start as NaN."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import merge, plan, reference, tree_attention_partial
from pallas_kernels.tree_attention.cases import RANK, ROPE, SCALE, random_trees
from pallas_kernels.tree_attention.config import choose
from pallas_kernels.tree_attention.schedule import make_plan
from pallas_kernels.tree_attention.tune import HOPPER
from tests.pallas_kernels.backends import needs_gpu

pytestmark = needs_gpu

LARGEST_ERROR = 5e-3  # relative norm of a token's error: bf16 weights and result, float32 sums


def poison() -> None:
    """Fill memory that the next outputs are likely to get with NaN, and free it."""
    jax.block_until_ready([jnp.full((2**20,), jnp.nan, jnp.float32) for _ in range(256)])


@pytest.mark.parametrize("kernel", ["triton", "mosaic"])
@pytest.mark.parametrize("mask", ["chain", "trees"])
@pytest.mark.parametrize(
    "heads,q,streams,rows",
    [
        (8, 1, 1, 1088),
        (8, 1, 3, 4096 + 1),
        (8, 8, 1, 8192),
        (8, 9, 10, 4096 + 9),
        (8, 32, 2, 2048),
        (8, 33, 2, 2048 + 33),
        (64, 9, 1, 3000),
        (4, 64, 2, 1024),
        (8, 100, 1, 700),
    ],
)
def test_bfloat16_of_k2(heads, q, streams, rows, mask, kernel):
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"{seed=}")
    if kernel == "mosaic":
        needs_hopper()
        rows = -(-rows // 8) * 8
    check(np.random.default_rng(seed), heads, q, streams, rows, mask, RANK, ROPE, jnp.bfloat16, kernel)


def needs_hopper():
    if not any(name in jax.devices()[0].device_kind for name in HOPPER):
        pytest.skip("the Mosaic kernel is for Hopper")


def test_small_model():
    check(np.random.default_rng(1), 4, 9, 2, 333, "trees", 64, 16, jnp.bfloat16, "triton")


def test_fp8_cache():
    """Against a reference on the same rounded rows."""
    check(np.random.default_rng(2), 8, 9, 2, 2048, "trees", RANK, ROPE, jnp.float8_e4m3fn, "triton")


def check(rng, heads, q, streams, rows, mask, rank, rope, cache_dtype, kernel):
    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    q_latent, q_rope = (0.3 * normal(streams, q, heads, n) for n in (rank, rope))
    q_latent, q_rope = q_latent.astype(jnp.bfloat16), q_rope.astype(jnp.bfloat16)
    cache = normal(streams, rows, rank + rope).astype(cache_dtype)
    lengths = np.asarray(rng.integers(0, rows - q + 1, streams), np.int32)
    lengths[0] = rows - q  # the tree ends with the cache
    if streams > 1:
        lengths[1] = 0
    ancestors = None if mask == "chain" else jnp.asarray(random_trees(rng, streams, q))
    kind, size = jax.devices()[0].device_kind, (q * heads, streams, rows, q_latent.dtype, cache.dtype)
    shared = make_plan(
        jnp.asarray(lengths),
        ancestors,
        query_rows=q * heads,
        q=q,
        rows=rows,
        config=choose(kind, *size, kernels=(kernel,)),
    )
    run = jax.jit(functools.partial(tree_attention_partial, scale=SCALE, backend=kernel))
    poison()
    out, lse = run(q_latent, q_rope, cache, jnp.asarray(lengths), ancestors, shared=shared)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(reference, scale=SCALE))(
            q_latent, q_rope, cache, jnp.asarray(lengths), ancestors
        )
    off = np.linalg.norm(np.asarray(out, np.float32) - np.asarray(expected), axis=-1)
    relative = off / np.linalg.norm(np.asarray(expected), axis=-1)
    assert np.isfinite(relative).all() and np.isfinite(lse).all()
    assert relative.max() < LARGEST_ERROR, relative.max()


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_one_plan_serves_every_layer(backend):
    if backend == "mosaic":
        needs_hopper()
    rng = np.random.default_rng(3)
    q_latent, q_rope, cache = (
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((1, 8, 8, RANK), (1, 8, 8, ROPE), (1, 512, 576))
    )
    lengths, ancestors = jnp.asarray([300], jnp.int32), jnp.asarray(random_trees(rng, 1, 8))
    run = jax.jit(functools.partial(tree_attention_partial, scale=SCALE, backend=backend))
    shared = plan(
        lengths,
        ancestors,
        q=8,
        heads=8,
        cache_rows=512,
        rank=RANK,
        rope=ROPE,
        dtype=q_latent.dtype,
        cache_dtype=cache.dtype,
        backend=backend,
    )
    own = run(q_latent, q_rope, cache, lengths, ancestors)[0]
    np.testing.assert_array_equal(own, run(q_latent, q_rope, cache, lengths, ancestors, shared=shared)[0])


def test_mosaic_parts_of_a_sharded_cache_merge_to_the_whole():
    """Three shards: wholly committed, holding most of the tree, holding its end; one slot ends before."""
    needs_hopper()
    rng = np.random.default_rng(4)
    q_latent, q_rope, cache = (
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((2, 9, 8, RANK), (2, 9, 8, ROPE), (2, 192, 576))
    )
    lengths, mask = jnp.asarray([121, 30], jnp.int32), jnp.asarray(random_trees(rng, 2, 9))
    run = jax.jit(functools.partial(tree_attention_partial, scale=0.05, backend="mosaic"))
    parts = [run(q_latent, q_rope, cache[:, at : at + 64], lengths - at, mask) for at in (0, 64, 128)]
    outs, lses = (jnp.stack(x) for x in zip(*parts, strict=True))
    assert np.isneginf(lses[2, 1]).all() and not np.asarray(outs[2, 1]).any()
    whole, lse = run(q_latent, q_rope, cache, lengths, mask)
    out, joined = merge(outs, lses)
    np.testing.assert_allclose(joined, lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(whole, np.float32), atol=2e-2)
