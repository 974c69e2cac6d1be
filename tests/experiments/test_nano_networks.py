"""The training networks compute the same functions as the float64 reference, rounding aside."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.nano import draft_network, network
from experiments.nano.config import NanoConfig
from kdjax.config.strict import load
from kdjax.reference import drafter as reference_drafter
from kdjax.reference import model as reference_model

CONFIG = load(NanoConfig, pathlib.Path(__file__).parents[2] / "configs/experiments/nano.toml")


@pytest.fixture(autouse=True)
def usual_promotion():
    """The strict promotion of this suite is a rule for the library; the training code broadcasts freely."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def widen(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@pytest.fixture
def target():
    config = CONFIG.target
    params = network.init_params(config, jax.random.key(0))
    bias = jax.random.normal(jax.random.key(1), network.init_router_bias(config).shape) * 0.05
    return params, bias


def reference_params(params, bias):
    thawed, _ = network.thaw(CONFIG.target, network.freeze(CONFIG.target, params, bias))
    out = widen(thawed)
    for i, b in enumerate(np.asarray(bias, np.float64)):
        out["layers"][i + 1]["mlp"]["gate"]["e_score_correction_bias"] = b
    return out


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_target_equals_reference(target):
    params, bias = target
    tokens = np.random.default_rng(0).integers(0, 4096, 48)
    thawed, _ = network.thaw(CONFIG.target, network.freeze(CONFIG.target, params, bias))
    fake = network.forward(CONFIG.target, thawed, bias, tokens[None], int4=False, dtype=jnp.float32)
    ref = reference_model.forward(
        reference_params(params, bias), CONFIG.target, tokens, np.arange(48), reference_model.empty_cache(CONFIG.target)
    )
    assert relative(fake.hidden[0], ref.hidden) < 1e-4
    for layer, residual in enumerate(fake.residuals):
        assert relative(residual[0], ref.residual[layer]) < 1e-4


def test_frozen_experts_are_what_training_saw(target):
    params, _ = target
    weight = params["layers"][1]["mlp"]["experts"]["down_proj"]["weight"]
    seen = network.straight_through_int4(weight, 32).astype(jnp.bfloat16)
    stored = network.int4_values(*network.int4_parts(weight, 32)).astype(jnp.bfloat16)
    assert np.mean(np.asarray(seen != stored)) < 1e-3  # the straight-through sum may round once more


@pytest.mark.parametrize("start", [1, 40, 300])
def test_drafter_equals_reference(start):
    config = CONFIG.drafter
    params = draft_network.init_params(config, jax.random.key(2))
    bf16 = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    rng = np.random.default_rng(start)
    taps = jnp.asarray(rng.normal(size=(1, 320, 768)), jnp.bfloat16)
    block = jnp.asarray(rng.normal(size=(1, 1, config.block_size, 256)), jnp.bfloat16)
    out = draft_network.forward(config, bf16, taps, jnp.full((1, 1), start), block)
    ref = widen(bf16)
    context = reference_drafter.context(ref, config, widen(taps)[0, :start], np.arange(start))
    expected = reference_drafter.draft(ref, config, widen(block)[0, 0], start, context)
    assert relative(out[0, 0], expected[-(config.block_size - 1) :]) < 0.03
