"""Choosing tokens from a vocabulary that is split over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from kdjax import tree as ddtree
from kdjax.config import Sampling
from kdjax.decode.sampling import largest, sample

AXES = ("outer", "inner")
SPLIT = P(None, None, AXES)
ROWS, VOCAB = 24, 1024  # 128 tokens per device: filters that keep more of them look beyond the first candidates


def on_eight(function, *specs):
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))


@pytest.mark.parametrize(
    "config",
    [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=0.8, top_k=40, min_p=0.01),
        Sampling(temperature=1.0, top_p=0.95),
    ],
    ids=lambda c: f"T{c.temperature}-k{c.top_k}-p{c.top_p}-m{c.min_p}",
)
@pytest.mark.parametrize("spread", [3.0, 0.05])
def test_tokens_are_those_of_one_device(config, spread):
    rng = np.random.default_rng(5)
    logits = jnp.asarray((np.round(rng.normal(size=(2, ROWS, VOCAB)) * 8) / 8 * spread).astype(np.float32))  # ties
    positions = jnp.asarray(rng.integers(0, 200_000, (2, ROWS)), jnp.int32)
    seeds = jnp.asarray([3, 2**32 - 1], jnp.uint32)
    expected = jax.jit(sample, static_argnums=3)(logits, positions, seeds, config)
    split = on_eight(lambda x, p, s: sample(x, p, s, config, AXES), SPLIT, P(), P())
    np.testing.assert_array_equal(split(logits, positions, seeds), expected)
    assert len(np.unique(np.asarray(expected) // (VOCAB // 8))) == 8  # every device wins somewhere


def test_no_device_hides_a_nan():
    logits = jnp.zeros((1, 8, VOCAB)).at[0, jnp.arange(8), jnp.arange(8) * 128].set(jnp.nan)
    assert np.isnan(on_eight(lambda x: largest(x, AXES), SPLIT)(logits)).all()


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("make", [ddtree.build, ddtree.chain])
def test_trees_are_those_of_one_device(make, backend):
    """Integer logits tie within and across devices, and rows with a NaN or without a finite value give the root."""
    rng = np.random.default_rng(6)
    logits = rng.integers(0, 9, (4, 5, VOCAB)).astype(np.float32)
    logits[2, 3, 700] = np.nan
    logits[3, 1] = -np.inf
    roots = jnp.asarray([1, 2, 3, 4], jnp.int32)
    budget = 5
    split = on_eight(functools.partial(make, budget=budget, axes=AXES, backend=backend), SPLIT, P())
    got, expected = split(jnp.asarray(logits), roots), make(jnp.asarray(logits), roots, budget)
    for field in ("tokens", "depths", "parents", "ancestors", "n_valid"):
        np.testing.assert_array_equal(getattr(got, field), getattr(expected, field))
    assert got.n_valid.tolist() == [6, 6, 1, 1]
    np.testing.assert_allclose(got.scores, expected.scores, rtol=1e-6)
