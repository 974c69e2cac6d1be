"""The drafter against z-lab's code and an independent implementation of the mask rule (golden vectors)."""

import pathlib

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from kdjax import drafter as dflash
from kdjax.checkpoint import load_drafter, read_drafter_config
from kdjax.model.runtime import CPU_EXACT, Runtime
from pallas_kernels.draft_attention.softmax import block_sees, context_sees
from tests import oracles, tolerances
from tests.checkpoint.random_models import TARGET

pytestmark = pytest.mark.newest

EXACT = Runtime(compute_dtype="float32", cache_dtype="float32")
SLOTS = 2


def fitting_target(config):
    return msgspec.structs.replace(
        TARGET,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_target_layers,
    )


def load(folder: pathlib.Path, runtime: Runtime):
    return load_drafter(folder, runtime, fitting_target(read_drafter_config(folder)))


context = jax.jit(dflash.context, static_argnames=("config", "runtime"))
draft = jax.jit(dflash.draft, static_argnames=("config", "runtime"))
features = jax.jit(dflash.features, static_argnames=("config", "runtime"))
append = jax.jit(dflash.append)
ROWS = 40


def both_slots(rows, size):
    """The case in slot 1, padded to `size`; another, unrelated text in slot 0."""
    rows = np.pad(rows, [(0, size - len(rows)), (0, 0)])
    other = np.random.default_rng(7).normal(size=rows.shape).astype(np.float32)
    return jnp.asarray(np.stack([other, rows]))


def steps(case):
    return range(sum(name.endswith(".target_hidden") for name in case.inputs))


@pytest.mark.parametrize("name", oracles.DFLASH)
@pytest.mark.parametrize("runtime", [EXACT, CPU_EXACT], ids=["checkpoint", "fused"])
def test_drafts_and_context_equal_the_golden_vectors(oracle, name, runtime):
    case = oracle(name)
    config, params = (d := load(case.checkpoint, runtime)).config, d.params
    lm_head = case.inputs["lm_head.weight"].astype(np.float32)
    cache = dflash.DraftCache.empty(config, SLOTS, 60, "float32")
    start = 0
    for s in steps(case):
        taps = case.inputs[f"s{s}.target_hidden"]
        n = len(taps)
        positions = jnp.broadcast_to(jnp.arange(start, start + ROWS, dtype=jnp.int32)[None], (SLOTS, ROWS))
        padded = both_slots(taps, ROWS)
        tolerances.DRAFTER.check(features(params, config, padded, runtime)[1, :n], case.expected[f"s{s}.ctx"])
        k, v = context(params, config, padded, positions, runtime)
        cache = append(cache, k, v, jnp.full(SLOTS, start, jnp.int32), jnp.full(SLOTS, n, jnp.int32))
        start += n
        block = both_slots(case.inputs[f"s{s}.noise_embedding"], config.block_size)
        hidden = draft(params, config, block, jnp.full(SLOTS, start, jnp.int32), cache, runtime)[1]
        tolerances.DRAFTER.check(hidden, case.expected[f"s{s}.hidden"][1:], f"step {s}")
        tolerances.DRAFTER.check(np.asarray(hidden) @ lm_head.T, case.expected[f"s{s}.logits"], f"step {s}")
    last = config.num_hidden_layers - 1
    for layer in (0, last):
        for part, rows in (("ctx_k", cache.k), ("ctx_v", cache.v)):
            expected = case.expected[f"s{s}.{part}.{layer}"]
            assert len(expected) == start
            tolerances.DRAFTER.check(rows[layer][1, :start], expected, f"{part} of layer {layer}")


@pytest.mark.parametrize("name", oracles.DFLASH[2:])
def test_visibility_equals_the_golden_rule(oracle, name):
    case = oracle(name)
    config = read_drafter_config(case.checkpoint)
    start = 0
    for s in steps(case):
        start += len(case.inputs[f"s{s}.target_hidden"])
        rows = jnp.arange(start, dtype=jnp.int32)
        for layer in range(config.num_hidden_layers):
            context_part = context_sees(jnp.array([start], jnp.int32), config.block_size, rows, config.window(layer))[0]
            block_part = block_sees(1, config.block_size, config.causal_in_block(layer))[0]
            ours = np.concatenate([context_part, block_part], axis=1)
            np.testing.assert_array_equal(ours, case.expected[f"s{s}.visibility"][layer])
