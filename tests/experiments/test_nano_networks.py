"""The training networks compute the same functions as the float64 reference, rounding aside."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from experiments.nano import draft_network, network
from experiments.nano.config import NanoConfig
from kdjax.config.strict import load
from kdjax.reference import drafter as reference_drafter
from kdjax.reference import model as reference_model

CONFIG = load(NanoConfig, pathlib.Path(__file__).parents[2] / "configs/experiments/nano.toml")
TARGET = msgspec.structs.replace(CONFIG.target, num_hidden_layers=3)


def widen(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@pytest.fixture
def target(random_params):
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(2, TARGET.n_routed_experts)) * 0.05, jnp.float32)
    return random_params(network.init_params, TARGET), bias


def reference_params(params, bias):
    thawed, _ = network.thaw(TARGET, network.freeze(TARGET, params, bias))
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
    thawed, _ = network.thaw(TARGET, network.freeze(TARGET, params, bias))
    forward = jax.jit(functools.partial(network.forward, TARGET, int4=False, dtype=jnp.float32))
    fake = forward(thawed, bias, tokens[None])
    ref = reference_model.forward(
        reference_params(params, bias), TARGET, tokens, np.arange(48), reference_model.empty_cache(TARGET)
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
def test_drafter_equals_reference(start, random_params):
    config = CONFIG.drafter
    params = random_params(draft_network.init_params, config)
    bf16 = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), params)
    rng = np.random.default_rng(start)
    taps = jnp.asarray(rng.normal(size=(1, 320, 768)), jnp.bfloat16)
    block = jnp.asarray(rng.normal(size=(1, 1, config.block_size, 256)), jnp.bfloat16)
    out = jax.jit(draft_network.forward, static_argnums=0)(config, bf16, taps, jnp.full((1, 1), start), block)
    ref = widen(bf16)
    context = reference_drafter.context(ref, config, widen(taps)[0, :start], np.arange(start))
    expected = reference_drafter.draft(ref, config, widen(block)[0, 0], start, context)
    assert relative(out[0, 0], expected[-(config.block_size - 1) :]) < 0.03
