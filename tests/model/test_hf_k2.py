"""The whole model against transformers (float32), from the packed checkpoint, prefilled in chunks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdjax.checkpoint import load_target
from kdjax.model import cache as kv
from kdjax.model import k2
from kdjax.model.cache import KVCache
from kdjax.model.runtime import CPU_EXACT, Runtime
from tests.tolerances import TARGET_CACHE, TARGET_LOGITS, TARGET_RESIDUAL

pytestmark = pytest.mark.newest

PACKED = Runtime(compute_dtype="float32", cache_dtype="float32", expert_weights="packed")
DEQUANTIZED = Runtime(compute_dtype="float32", cache_dtype="float32", expert_weights="dequantized")
MATERIALISED = Runtime(compute_dtype="float32", cache_dtype="float32", expert_weights="dequantized", mla="materialised")
CHUNK, CAPACITY = 32, 256

commit = jax.jit(kv.commit)


@functools.cache
def model(path, runtime):
    target = load_target(path, runtime)
    return target.config, target.params


@functools.partial(jax.jit, static_argnames=("config", "runtime"))
def run(params, config, tokens, cache, runtime):
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    taps = tuple(range(config.num_hidden_layers))
    out = k2.forward(params, config, tokens, positions, cache, taps=taps, runtime=runtime)
    return out, k2.logits(params, config, out.hidden, runtime)


def prefill(config, params, prompt, runtime):
    """Logits and taps of every position, and the committed cache. One compiled program for every prompt length."""
    cache = KVCache.empty(config, 1, CAPACITY, CHUNK, runtime.cache_dtype)
    logits, taps = [], []
    for first in range(0, len(prompt), CHUNK):
        part = prompt[first : first + CHUNK].astype(np.int32)
        out, chunk_logits = run(params, config, np.pad(part, (0, CHUNK - len(part)))[None], cache, runtime)
        cache = commit(out.cache, jnp.arange(CHUNK, dtype=jnp.int32)[None], jnp.asarray([len(part)], dtype=jnp.int32))
        logits.append(np.asarray(chunk_logits[0, : len(part)]))
        taps.append(np.asarray(out.taps[0, : len(part)]))
    return np.concatenate(logits), np.concatenate(taps), cache


@pytest.mark.parametrize(
    "runtime", [CPU_EXACT, DEQUANTIZED, PACKED, MATERIALISED], ids=["fused", "dequantized", "packed", "materialised"]
)
@pytest.mark.parametrize("case", ["hf_k2_a", "hf_k2_b"])
def test_prompts_match_transformers(oracle, case, runtime):
    o = oracle(case)
    config, params = model(o.checkpoint, runtime)
    for prompt in ("p0", "p1", "p2"):
        ids, rows = o.expected[f"{prompt}.input_ids"], o.expected[f"{prompt}.rows"]
        logits, taps, cache = prefill(config, params, ids, runtime)
        TARGET_LOGITS.check(logits[rows], o.expected[f"{prompt}.logits"], prompt)
        taps = taps.reshape(len(ids), config.num_hidden_layers, -1)
        for layer in range(config.num_hidden_layers):
            TARGET_RESIDUAL.check(
                taps[rows, layer], o.expected[f"{prompt}.residual.{layer}"], f"{prompt}, layer {layer}"
            )
            if (name := f"{prompt}.kv_latent.{layer}") in o.expected:
                expected = [o.expected[name], o.expected[f"{prompt}.k_pe_interleaved.{layer}"]]
                row = cache.latent[layer][0, : len(ids)]
                TARGET_CACHE.check(row, np.concatenate(expected, axis=-1), f"{prompt}, cache of layer {layer}")
        embedded = k2.embed(params, jnp.asarray(ids[rows], dtype=jnp.int32), runtime)
        np.testing.assert_array_equal(embedded, o.expected[f"{prompt}.embed"])


@pytest.mark.parametrize("case", ["hf_k2_a", "hf_k2_b"])
def test_greedy_decoding_matches_transformers(oracle, case):
    o = oracle(case)
    config, params = model(o.checkpoint, CPU_EXACT)
    for prompt in ("p0", "p1", "p2"):
        logits, _, cache = prefill(config, params, o.expected[f"{prompt}.input_ids"], CPU_EXACT)
        last = logits[-1]
        for i, token in enumerate(o.expected[f"{prompt}.greedy_tokens"]):
            TARGET_LOGITS.check(last, o.expected[f"{prompt}.greedy_logits"][i], f"{prompt}, step {i}")
            assert int(np.argmax(last)) == token
            out, step_logits = run(params, config, jnp.asarray([[token]], dtype=jnp.int32), cache, CPU_EXACT)
            cache = commit(out.cache, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
            last = np.asarray(step_logits[0, 0])
