"""One suite for every backend of prefill attention."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot
from pallas_kernels.prefill_attention import prefill_attention, reference
from tests.pallas_kernels.backends import BACKENDS, needs_gpu
from tests.tolerances import ATTENTION_BFLOAT16, ATTENTION_FLOAT32

HEADS, NOPE, ROPE, V, RANK, SCALE = 3, 16, 8, 12, 32, 0.2

run = functools.partial(jax.jit, static_argnames=("scale", "backend", "segment"))(prefill_attention)


def inputs(rng, slots, q, rows, dtype=jnp.float32, sizes=(HEADS, NOPE, ROPE, V, RANK)):
    heads, nope, rope, v, rank = sizes

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return (
        normal(slots, q, heads, nope),
        normal(slots, q, heads, rope),
        normal(slots, rows, rank + rope),
        normal(heads, nope + v, rank) * jnp.asarray(rank**-0.5, dtype),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q,rows,lengths", [(1, 40, [0, 39]), (20, 300, [0, 250]), (50, 700, [650, 270])])
def test_matches_reference(backend, q, rows, lengths):
    """Prefix 0, a chunk across a segment's border, a chunk that ends with the cache; segments of 256 rows."""
    q_nope, q_rope, cache, up = inputs(np.random.default_rng(q), 2, q, rows)
    lengths = jnp.asarray(lengths, jnp.int32)
    got = run(q_nope, q_rope, cache, lengths, up, scale=SCALE, backend=backend, segment=256)
    ATTENTION_FLOAT32.check(got, reference(q_nope, q_rope, cache, lengths, up, scale=SCALE))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend):
    q_nope, q_rope, cache, up = inputs(np.random.default_rng(0), 1, 33, 200, jnp.bfloat16)
    lengths = jnp.asarray([120], jnp.int32)
    got = run(q_nope, q_rope, cache, lengths, up, scale=SCALE, backend=backend)
    assert got.dtype == jnp.bfloat16
    expected = reference(q_nope, q_rope, cache, lengths, up, scale=SCALE)
    ATTENTION_BFLOAT16.check(np.asarray(got, np.float32), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_after_a_token_have_no_influence(backend):
    q_nope, q_rope, cache, up = inputs(np.random.default_rng(1), 1, 9, 64)
    lengths = jnp.asarray([30], jnp.int32)
    clean = run(q_nope, q_rope, cache, lengths, up, scale=SCALE, backend=backend)
    for token in (0, 4, 8):
        poisoned = cache.at[:, 31 + token :].set(1e4)
        got = run(q_nope, q_rope, poisoned, lengths, up, scale=SCALE, backend=backend)
        np.testing.assert_array_equal(got[:, : token + 1], clean[:, : token + 1])


def test_unsupported_backend_is_named():
    q_nope, q_rope, cache, up = inputs(np.random.default_rng(0), 1, 2, 64)
    with pytest.raises(NotImplementedError, match="backend='cudnn'.*xla"):
        prefill_attention(q_nope, q_rope, cache, jnp.zeros(1, jnp.int32), up, scale=SCALE, backend="cudnn")


K2 = (8, 128, 64, 128, 512)
triton = functools.partial(prefill_attention, scale=SCALE, backend="triton")


def k2_arguments():
    q_nope, q_rope, cache, up = jax.eval_shape(lambda: inputs(np.random.default_rng(0), 1, 512, 9000, jnp.bfloat16, K2))
    return q_nope, q_rope, cache, jax.ShapeDtypeStruct((1,), jnp.int32), up


@pytest.mark.newest
@pytest.mark.parametrize("kind", aot.TARGETS)
def test_lowers(kind):
    assert "prefill_attention" in aot.lower_for(kind, triton, *k2_arguments())


@pytest.mark.skipif(not aot.available(), reason="full compiles need jax[cuda13]")
@pytest.mark.parametrize("kind", aot.TARGETS)
def test_fits_the_device(kind):
    aot.compile_for(kind, triton, *k2_arguments())


@pytest.mark.parametrize("q,rows,lengths", [(512, 9000, [8488]), (300, 1000, [0]), (700, 3000, [64])])
@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_gpu)])
def test_k2_on_the_gpu(mark, q, rows, lengths):
    q_nope, q_rope, cache, up = inputs(np.random.default_rng(q), 1, q, rows, jnp.bfloat16, K2)
    lengths = jnp.asarray(lengths, jnp.int32)
    got = run(q_nope, q_rope, cache, lengths, up, scale=0.07, backend="triton").astype(jnp.float32)
    expected = reference(q_nope, q_rope, cache, lengths, up, scale=0.07)
    relative = jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)
    assert relative < 5e-3, relative


def test_bench_writes_its_rows(monkeypatch, tmp_path):
    from pallas_kernels import timing
    from pallas_kernels.prefill_attention import bench

    monkeypatch.setattr(timing, "matmul_peak", lambda: 1.0)
    bench.run((bench.Case(1, 16, 16),), tmp_path / "rows.json", 60.0, False, backend="interpret")
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["us"] > 0 and row["error"] < 5e-3
