"""The kernels around the attention against the functions of the model that they stand for, and compiled for GPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kdjax.model import cache as kv
from kdjax.model import rope
from kdjax.model.norm import rms_norm
from pallas_kernels import aot
from pallas_kernels.mla_projections import absorb_queries, compress, expand_values
from pallas_kernels.numerics import matmul_nt
from pallas_kernels.split import split_matmul_nt
from tests.pallas_kernels.backends import needs_gpu
from tests.tolerances import ATTENTION_BFLOAT16, SAME_MODEL_FLOAT32

KERNELS = ["interpret", pytest.param("triton", marks=needs_gpu)]
DTYPES = ["float32", "bfloat16"]
EPS, X_EPS = 1e-6, 1e-5


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32).astype(dtype)


def angles(tokens, half):
    return rope.cos_sin(jnp.arange(100, 100 + tokens, dtype=jnp.int32), 10.0 ** -np.arange(half, dtype=np.float32), 1.0)


def check(actual, expected):
    tolerance = SAME_MODEL_FLOAT32 if expected.dtype == jnp.float32 else ATTENTION_BFLOAT16
    tolerance.check(np.asarray(actual, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(40, 24, 8), (128, 64, 16)], ids=["padded", "whole"])
def test_compress(dtype, sizes, backend):
    """The last token of the second stream does not fit: it is dropped, and no other row changes."""
    q_rank, rank, width = sizes
    slots, n, cached = 2, 3, 12
    starts = jnp.asarray([4, cached - 2], jnp.int32)
    parts, x = normal(0, 4, slots * n, q_rank + rank + width), normal(4, slots * n, 24, dtype=dtype)
    q_weight, kv_weight = (1 + normal(i, size, dtype=dtype) for i, size in ((1, q_rank), (2, rank)))
    cache = normal(3, slots, cached, rank + width, dtype=dtype)
    cos, sin = angles(slots * n, width // 2)

    scale = lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + X_EPS)
    product = (jnp.sum(parts, axis=0) * scale).astype(dtype)
    latent = rms_norm(product[:, q_rank : q_rank + rank], kv_weight, EPS)
    rows = jnp.concatenate([latent, rope.rotate_interleaved(product[:, q_rank + rank :], cos, sin)], axis=-1)
    expected = kv.append(cache, rows.reshape(slots, n, -1), starts)

    row = kv.appended(starts, n, cached).reshape(-1)
    q, written = jax.jit(functools.partial(compress, x_eps=X_EPS, eps=EPS, backend=backend))(
        parts, x, q_weight, kv_weight, cos, sin, cache, row
    )
    check(q, rms_norm(product[:, :q_rank], q_weight, EPS))
    check(written, expected)
    kept = np.asarray(expected == cache)
    np.testing.assert_array_equal(np.asarray(written)[kept], np.asarray(cache)[kept])


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "nope", "width", "rank"), [(18, 12, 8, 80), (5, 32, 16, 64)], ids=["padded", "whole"]
)
def test_absorb_queries_and_expand_values(dtype, tokens, nope, width, rank, backend):
    heads, v = 3, 20
    parts = normal(0, 2, tokens, heads * (nope + width))
    w = normal(1, heads, nope + v, rank, dtype=dtype) * rank**-0.5
    cos, sin = angles(tokens, width // 2)
    q = jnp.sum(parts, axis=0).astype(dtype).reshape(1, tokens, heads, -1)

    def exact(equation, *operands):
        return np.einsum(equation, *(np.asarray(a, np.float64) for a in operands)).astype(jnp.dtype(dtype))

    q_latent, q_rope = jax.jit(functools.partial(absorb_queries, backend=backend))(parts, w, cos, sin)
    check(q_latent, exact("thn,hnr->thr", q[0, ..., :nope], w[:, :nope]))
    check(q_rope, rope.rotate_interleaved_heads(q[..., nope:], cos[None], sin[None])[0])

    latent = normal(2, tokens, heads, rank, dtype=dtype)
    values = jax.jit(functools.partial(expand_values, v=v, backend=backend))(latent, w)
    check(values, exact("thr,hvr->thv", latent, w[:, nope:]))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("tokens", "outs", "width"), [(3, (40, 24), 512), (300, (64,), 256), (4, (8, 8), 24), (1, (8, 9), 256)]
)
def test_partial_sums_add_up_to_the_product(tokens, outs, width, scaled):
    x, weights = normal(0, tokens, width), [normal(1 + i, out, width) * width**-0.5 for i, out in enumerate(outs)]
    scale = 1 + normal(9, width) if scaled else None
    parts = jax.jit(functools.partial(split_matmul_nt, column_scale=scale))(x, *weights)
    assert parts.shape[0] == max(width // 128, 1)
    scaled_x = x if scale is None else x * scale[None]
    expected = jnp.concatenate([matmul_nt(scaled_x, weight) for weight in weights], axis=1)
    check(jnp.sum(parts, axis=0)[:tokens], expected)


@pytest.mark.skipif(not aot.available(), reason="full compiles need jax[cuda13]")
def test_of_one_token_xla_makes_a_product():
    """And not a reduction, which reads at half of the rate."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 7168), (1536, 7168), (576, 7168))]
    text = aot.compile_for("NVIDIA H200", split_matmul_nt, *shapes).as_text() or ""
    assert "gemm" in text and " reduce(" not in text


def test_products_that_keep_a_gpu_busy_are_not_cut():
    shapes = jax.ShapeDtypeStruct((8, 7168), jnp.bfloat16), jax.ShapeDtypeStruct((20480, 7168), jnp.bfloat16)
    assert jax.eval_shape(split_matmul_nt, *shapes).shape == (1, 8, 20480)


def test_other_backends_are_refused():
    with pytest.raises(NotImplementedError, match="expand_values: backend='xla' is not supported; supported: triton"):
        expand_values(normal(0, 1, 1, 16), normal(1, 1, 32, 16), 16, backend="xla")


def around_attention(parts, x, q_weight, kv_weight, cos, sin, cache, row, q_parts, w, latent):
    eps = dict(x_eps=X_EPS, eps=EPS)
    q, cache = compress(parts, x, q_weight, kv_weight, cos, sin, cache, row, **eps, backend="triton")
    return (
        q,
        cache,
        absorb_queries(q_parts, w, cos, sin, backend="triton"),
        expand_values(latent, w, 128, backend="triton"),
    )


def k2_arguments(tokens, heads):
    def of(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    f32, bf16 = functools.partial(of, jnp.float32), functools.partial(of, jnp.bfloat16)
    return (
        *(f32(8, tokens, 2112), bf16(tokens, 7168), bf16(1536), bf16(512), f32(tokens, 32), f32(tokens, 32)),
        *(bf16(1, 4360, 576), of(jnp.int32, tokens), f32(8, tokens, heads * 192), bf16(heads, 256, 512)),
        bf16(tokens, heads, 512),
    )


@pytest.mark.parametrize("kind", aot.TARGETS)
def test_kernels_lower_for(kind):
    text = aot.lower_for(kind, around_attention, *k2_arguments(8, 8))
    for kernel in ("mla_compress", "mla_absorb_queries", "mla_expand_values"):
        assert kernel in text


@pytest.mark.skipif(not aot.available(), reason="full compiles need jax[cuda13]")
@pytest.mark.parametrize("kind", aot.TARGETS)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 8), (80, 64)])
def test_kernels_fit_the_device(kind, tokens, heads):
    aot.compile_for(kind, around_attention, *k2_arguments(tokens, heads))
