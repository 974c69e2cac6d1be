"""The Triton kernels of tree attention without a GPU: lowering in every run, full compiles where jax[cuda13] is."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.config import Config, _tables
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
