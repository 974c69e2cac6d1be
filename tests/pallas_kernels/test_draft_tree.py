"""The kernels that build trees on GPUs, against the sorts and tables that CPUs use."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kdjax import tree as ddtree
from kdjax.errors import KdjaxError
from pallas_kernels import aot
from pallas_kernels.draft_tree import grow, top_k
from tests.pallas_kernels.backends import needs_gpu
from tests.tree.test_build import random_tables

MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="triton", marks=needs_gpu)]
SIZES = [(5, 5), (300, 31), (9000, 63)]


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("kind", ["distinct", "ties", "mostly -inf", "bfloat16"])
@pytest.mark.parametrize("n,k", [*SIZES, pytest.param(163840, 31, marks=needs_gpu)])
def test_top_k_and_log_sum_exp(interpret, kind, n, k):
    rng = np.random.default_rng(n + k)
    x = rng.standard_normal((3, n)).astype(np.float32)
    if kind == "ties":
        x = np.round(x) * np.where(rng.random(x.shape) < 0.5, np.float32(-1), np.float32(1))  # zeros of both signs
    if kind == "mostly -inf":
        x[:, rng.random(n) < 0.9] = -np.inf
    x = jnp.asarray(x, jnp.bfloat16 if kind == "bfloat16" else jnp.float32)
    values, ids, lse, lp = jax.jit(functools.partial(top_k, k=k, interpret=interpret))(x)
    x = x.astype(jnp.float32)
    expected, order = lax.top_k(jnp.where(x == 0, jnp.float32(0), x), k)  # a sort puts -0.0 below 0.0
    np.testing.assert_array_equal(values, expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.asarray(ids)[finite], np.asarray(order)[finite])
    assert np.all((np.asarray(ids) >= 0) & (np.asarray(ids) < n))
    np.testing.assert_allclose(lse, jax.nn.logsumexp(x, axis=-1), rtol=1e-6)
    np.testing.assert_array_equal(lp, values - lse[:, None])


@pytest.mark.parametrize("interpret", MODES)
def test_rows_without_a_distribution_have_no_finite_log_probability(interpret):
    x = np.zeros((3, 700), np.float32)
    x[0, 300], x[1], x[2, 5] = np.nan, -np.inf, np.inf
    _, ids, _, lp = top_k(jnp.asarray(x), 4, interpret=interpret)
    assert not jnp.any(jnp.isfinite(lp[:, 0]))
    assert np.all((np.asarray(ids) >= 0) & (np.asarray(ids) < 700))


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize(("depth", "budget", "top"), [(7, 31, 31), (15, 40, 40), (1, 126, 126), (2, 8, 2)])
def test_grown_trees_are_those_of_the_table(interpret, depth, budget, top):
    """Ties of every kind, limits per slot, impossible tokens, and slots without a tree."""
    lp, ids = random_tables(np.random.default_rng(depth * budget), 8, depth, top)
    lp[4, :, top // 2 :] = -np.inf
    lp[5, -1, -1], lp[6, -1, :] = np.nan, -np.inf
    arrays = jnp.asarray(lp), jnp.asarray(ids), jnp.arange(8, dtype=jnp.int32)
    limit = jnp.asarray([budget, 0, 3, budget, budget, budget, budget, budget - 1], jnp.int32)
    expected = jax.jit(ddtree.select, static_argnums=3)(*arrays, budget, limit)
    grown = jax.jit(functools.partial(grow, budget=budget, interpret=interpret))(*arrays, limit)
    for name in ("tokens", "depths", "parents", "ancestors", "n_valid"):
        np.testing.assert_array_equal(getattr(grown, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(grown.scores, expected.scores, rtol=1e-6)


@pytest.mark.parametrize("budget", [3, 128])
def test_backends_build_the_same_trees(budget):
    """Beyond the nodes of the kernel, too. Integer logits tie; a slot without a distribution has the root alone."""
    logits = jnp.asarray(np.random.default_rng(budget).integers(0, 9, (3, 2, 300)), jnp.float32).at[2, 1].set(-jnp.inf)
    make = jax.jit(ddtree.build, static_argnames=("budget", "backend"))
    expected, got = (
        make(logits, jnp.arange(3, dtype=jnp.int32), budget=budget, backend=backend) for backend in ("xla", "interpret")
    )
    assert expected.n_valid.tolist() == [budget + 1, budget + 1, 1]
    for name in ("tokens", "depths", "parents", "ancestors", "n_valid"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
    with pytest.raises(KdjaxError, match="backend='cuda' is not supported: use one of xla, triton, interpret"):
        make(logits, jnp.arange(3, dtype=jnp.int32), budget=budget, backend="cuda")


def test_too_large_trees_are_refused():
    table = jnp.zeros((1, 2, 4)), jnp.zeros((1, 2, 4), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="127 nodes"):
        grow(*table, budget=127, interpret=True)


build = functools.partial(ddtree.build, budget=31, backend="triton")
K2 = jax.ShapeDtypeStruct((2, 7, 163840), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)


@pytest.mark.parametrize("kind", aot.TARGETS)
def test_gpus_use_the_kernels(kind):
    text = aot.lower_for(kind, build, *K2)
    for kernel in ("read_vocabulary", "choose_tokens", "grow_draft_tree"):
        assert kernel in text
    assert "sort" not in text


@pytest.mark.skipif(not aot.available(), reason="full compiles need jax[cuda13]")
@pytest.mark.parametrize("kind", aot.TARGETS)
@pytest.mark.parametrize("limited", [False, True])
def test_fits_the_device(kind, limited):
    limits = (jax.ShapeDtypeStruct((2,), jnp.int32),) if limited else ()
    aot.compile_for(
        kind, lambda logits, roots, *limits: build(logits, roots, budgets=limits[0] if limits else None), *K2, *limits
    )
