"""The kernels of tree attention without a GPU: lowering in every run, full compiles where jax[cuda13] is."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.config import Config, _tables, choose
from pallas_kernels.tree_attention.schedule import make_plan

SHAPES = [(8, 1, "bfloat16"), (8, 9, "bfloat16"), (8, 32, "bfloat16"), (64, 9, "bfloat16"), (8, 9, "float8_e4m3fn")]


def arguments(heads: int, q: int, cache: str, slots: int = 2, rows: int = 1096, rank: int = 512, rope: int = 64):
    s = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    return (
        s((slots, q, heads, rank)),
        s((slots, q, heads, rope)),
        jax.ShapeDtypeStruct((slots, rows, rank + rope), jnp.dtype(cache)),
        jax.ShapeDtypeStruct((slots,), jnp.int32),
        jax.ShapeDtypeStruct((slots, q, q), jnp.bool_),
    )


triton = functools.partial(tree_attention, scale=0.1, backend="triton")


@pytest.mark.newest
@pytest.mark.parametrize("kind", aot.TARGETS)
@pytest.mark.parametrize("heads,q,cache", SHAPES)
def test_lowers(kind, heads, q, cache):
    text = aot.lower_for(kind, triton, *arguments(heads, q, cache))
    assert "tree_attention_merge" in text


@pytest.mark.parametrize("kind", aot.TARGETS)
def test_lowers_for_small_models_and_float32(kind):
    aot.lower_for(kind, triton, *arguments(4, 5, "bfloat16", rank=64, rope=16))
    wide = [a.update(dtype=jnp.float32) if a.dtype == jnp.bfloat16 else a for a in arguments(3, 5, "float32", rank=48)]
    aot.lower_for(kind, triton, *wide)


@pytest.mark.skipif(not aot.available(), reason="full compiles need jax[cuda13]")
@pytest.mark.parametrize("kind", aot.TARGETS)
@pytest.mark.parametrize("heads,q,cache", SHAPES)
def test_fits_the_device(kind, heads, q, cache):
    """Shared memory beyond the device's limit fails here, not in lowering."""
    aot.compile_for(kind, triton, *arguments(heads, q, cache))


TUNED = sorted(
    {
        (config.rows, config.block, config.num_warps, config.num_stages, config.split_scores)
        for case in _tables()["NVIDIA H200"]
        for config in [Config(**case["config"])]
        if config.kernel == "triton"
    }
)


@pytest.mark.skipif(not aot.available(), reason="full compiles need jax[cuda13]")
@pytest.mark.parametrize("tiles", TUNED, ids=str)
def test_every_tuned_tile_fits(tiles):
    rows, block, warps, stages, split = tiles
    config = Config(rows, block, 132, warps, stages, split)

    def attend(q_latent, q_rope, cache, lengths, ancestors):
        heads, q = q_latent.shape[2], q_latent.shape[1]
        shared = make_plan(lengths, ancestors, query_rows=q * heads, q=q, rows=cache.shape[1], config=config)
        return triton(q_latent, q_rope, cache, lengths, ancestors, shared=shared)

    aot.compile_for("NVIDIA H200", attend, *arguments(8, 8, "bfloat16"))


H200, OTHER = aot.TARGETS
MOSAIC_SHAPES = [(8, 1), (8, 9), (8, 33), (64, 8)]
mosaic = functools.partial(tree_attention, scale=0.1, backend="mosaic")


@pytest.mark.newest
@pytest.mark.parametrize("heads,q", MOSAIC_SHAPES)
def test_mosaic_lowers(heads, q):
    text = aot.lower_for(H200, mosaic, *arguments(heads, q, "bfloat16"))
    assert "mosaic_gpu" in text and "tree_attention_merge" in text


@pytest.mark.skipif(not aot.available(), reason="full compiles need jax[cuda13]")
@pytest.mark.parametrize("heads,q", MOSAIC_SHAPES)
def test_mosaic_fits_the_device(heads, q):
    aot.compile_for(H200, mosaic, *arguments(heads, q, "bfloat16"))


@pytest.mark.parametrize(
    "kind,changed,why",
    [
        (OTHER, {}, f"mosaic cannot run on {OTHER}: use 'triton'"),
        (
            H200,
            {"rank": 64, "rope": 16},
            "a latent of 512 and a rotary part of 64 columns, not 64 and 16: use 'triton'",
        ),
        (H200, {"cache": "float8_e4m3fn"}, "bfloat16 queries and cache, not bfloat16 and float8_e4m3fn: use 'triton'"),
        (H200, {"rows": 1097}, "multiples of 8, not 1097: use 'triton'"),
    ],
)
def test_mosaic_says_what_it_cannot_take(kind, changed, why):
    with pytest.raises(NotImplementedError, match=why):
        aot.lower_for(kind, mosaic, *arguments(**({"heads": 8, "q": 8, "cache": "bfloat16"} | changed)))


def test_the_table_decides_between_the_kernels():
    """A long cache and many rows are Mosaic's; where that kernel may not run, the choice is the nearest of Triton's."""
    size = 256, 10, 131136, jnp.dtype("bfloat16"), jnp.dtype("bfloat16")
    assert choose(H200, *size, kernels=("mosaic", "triton")).kernel == "mosaic"
    assert choose(H200, *size).kernel == choose(OTHER, *size, kernels=("mosaic", "triton")).kernel == "triton"
    text = aot.lower_for(H200, triton, *arguments(8, 32, "bfloat16", slots=10, rows=131136))
    assert "mosaic_gpu" in text
    assert "mosaic_gpu" not in aot.lower_for(H200, triton, *arguments(8, 32, "float8_e4m3fn", slots=10, rows=131136))


@pytest.mark.parametrize("mask", ["chain", "tree"])
def test_mosaic_plan_has_a_word_per_row(mask):
    q, heads = 40, 3
    trees = np.random.default_rng(0).random((2, q, q)) < 0.5
    ancestors = None if mask == "chain" else jnp.asarray(trees)
    config = Config(64, 64, 132, kernel="mosaic")
    plan = make_plan(jnp.asarray([5, 0]), ancestors, query_rows=q * heads, q=q, rows=128, config=config)
    assert plan.words.shape == (2, 2, 128)
    node = np.arange(q)
    bits = (np.asarray(plan.words)[:, node // 32] >> (node % 32)[None, :, None]) & 1
    expected = np.broadcast_to(np.tril(np.ones((q, q), bool)), trees.shape) if mask == "chain" else trees
    np.testing.assert_array_equal(bits[..., : q * heads].transpose(0, 2, 1), np.repeat(expected, heads, axis=1))


def test_rows_are_looked_up_in_the_tiles_that_they_fill():
    """9 tokens of 8 heads fill two tiles of 64 rows, as 16 do, and not the one that 8 fill."""
    chosen = {
        tokens: choose(H200, 8 * tokens, 1, 32832, jnp.dtype("bfloat16"), jnp.dtype("bfloat16"), ("mosaic", "triton"))
        for tokens in (8, 9, 16)
    }
    assert chosen[9] == chosen[16] != chosen[8]
