"""One suite for every backend of draft attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot
from pallas_kernels.draft_attention import KEYS, draft_attention, reference
from tests.pallas_kernels.backends import BACKENDS
from tests.tolerances import ATTENTION_BFLOAT16, ATTENTION_FLOAT32

run = functools.partial(jax.jit, static_argnames=("causal", "window", "backend"))(draft_attention)


def inputs(seed, lengths, rows, dtype=jnp.float32, block=4, heads=6, kv_heads=2, head_dim=24):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    own = (len(lengths), block, kv_heads, head_dim)
    context = (len(lengths), rows, kv_heads, head_dim)
    start = jnp.asarray(lengths, jnp.int32)
    return normal(len(lengths), block, heads, head_dim), *(normal(*s) for s in (own, own, context, context)), start


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3, 150])
def test_matches_reference(backend, causal, window):
    """Ragged slots: no context, one row, a block's border, beyond a window, a full cache."""
    args = inputs(0, [0, 1, 64, 300, 4 * KEYS], 4 * KEYS)
    got = run(*args, causal=causal, window=window, backend=backend)
    ATTENTION_FLOAT32.check(got, reference(*args, causal=causal, window=window))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend):
    args = inputs(1, [200, 130], 2 * KEYS, jnp.bfloat16)
    got = run(*args, causal=False, window=None, backend=backend)
    assert got.dtype == jnp.bfloat16
    ATTENTION_BFLOAT16.check(np.asarray(got, np.float32), reference(*args, causal=False, window=None))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 40])
def test_rows_that_are_not_seen_have_no_influence(backend, window):
    query, k, v, context_k, context_v, start = inputs(2, [100], 2 * KEYS)
    row = np.arange(2 * KEYS)
    unseen = row >= 100 if window is None else (row >= 100) | (row <= 100 - window)
    changed = [jnp.where(unseen[None, :, None, None], 1e3, c) for c in (context_k, context_v)]
    plain = run(query, k, v, context_k, context_v, start, causal=False, window=window, backend=backend)
    other = run(query, k, v, *changed, start, causal=False, window=window, backend=backend)
    np.testing.assert_array_equal(plain, other)


def test_unknown_backend():
    with pytest.raises(NotImplementedError, match="cuda"):
        draft_attention(*inputs(0, [1], KEYS), causal=False, window=None, backend="cuda")


@pytest.mark.parametrize("kind", aot.TARGETS)
@pytest.mark.parametrize("window", [None, 2048])
def test_lowers_for(kind, window):
    """The shapes of one of eight devices."""
    args = jax.eval_shape(
        lambda: inputs(0, [1] * 2, 64 * KEYS, jnp.bfloat16, block=8, heads=8, kv_heads=1, head_dim=128)
    )
    call = functools.partial(draft_attention, causal=False, window=window, backend="triton")
    assert "draft_attention" in aot.lower_for(kind, call, *args)


@pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]: pip install 'kdjax[cuda13]'")
@pytest.mark.parametrize("kind", aot.TARGETS)
def test_compiles_for(kind):
    """Shared memory and registers suffice; the loop is in the kernel, so nothing asks the host."""
    args = jax.eval_shape(
        lambda: inputs(0, [1] * 2, 64 * KEYS, jnp.bfloat16, block=8, heads=8, kv_heads=1, head_dim=128)
    )
    call = functools.partial(draft_attention, causal=False, window=2048, backend="triton")
    assert " while(" not in aot.compile_for(kind, call, *args).as_text()
