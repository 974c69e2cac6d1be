"""Selection by counting, which GPUs use, against the sorts that CPUs use."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kdjax.tree import bench, ranking
from kdjax.tree.build import _smallest


@pytest.mark.parametrize("n,k", [(5, 5), (300, 31), (4096, 31), (5000, 63), (163840, 31)])
@pytest.mark.parametrize("kind", ["distinct", "ties", "mostly -inf"])
def test_top_k_equals_lax(n, k, kind):
    rng = np.random.default_rng(n + k)
    x = rng.standard_normal((2, n)).astype(np.float32)
    if kind == "ties":
        x = np.round(x)
    if kind == "mostly -inf":
        x[:, rng.random(n) < 0.99] = -np.inf
    got = jax.jit(functools.partial(ranking.top_k, k=k))(x)
    for a, b in zip(got, lax.top_k(jnp.asarray(x), k), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("n,k", [(7, 7), (500, 31)])
def test_smallest_equals_the_radix_passes(n, k):
    rng = np.random.default_rng(n)
    keys = rng.integers(0, 3, (4, n)).astype(np.float32)
    keys[0, rng.random(n) < 0.1] = np.inf
    np.testing.assert_array_equal(ranking.smallest(jnp.asarray(keys), k), _smallest(jnp.asarray(keys), k))


def test_bench_checks_every_tree(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "INPUTS", 2)
    monkeypatch.setattr(bench.timing, "measure", lambda *_: bench.timing.Timing(2.0, 1.0))
    bench.run(((2, 15),), tmp_path / "rows.json", 3, 500)
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["us"], row["equal_to_reference"]) == (1.0, "4 of 4")
