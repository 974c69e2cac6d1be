"""The whole model against transformers (float32), through the packed checkpoint."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdjax.model import cache as kv
from kdjax.model import k2
from kdjax.model.cache import KVCache
from kdjax.model.runtime import CPU_EXACT, Runtime
from tests.model.loader import read_config, read_params
from tests.tolerances import TARGET_LOGITS

PACKED = Runtime(compute_dtype="float32", cache_dtype="float32", expert_weights="packed")
MATERIALISED = Runtime(compute_dtype="float32", cache_dtype="float32", expert_weights="dequantized", mla="materialised")


@functools.cache
def model(path, runtime):
    config = read_config(path)
    return config, read_params(path, config, runtime)


commit = jax.jit(kv.commit)


@functools.partial(jax.jit, static_argnames=("config", "taps", "runtime"))
def run(params, config, tokens, positions, cache, taps, runtime):
    out = k2.forward(params, config, tokens, positions, cache, taps=taps, runtime=runtime)
    return out, k2.logits(params, config, out.hidden, runtime)


@pytest.mark.parametrize("runtime", [CPU_EXACT, PACKED, MATERIALISED], ids=["dequantized", "packed", "materialised"])
@pytest.mark.parametrize("prompt", ["p0", "p1", "p2"])
@pytest.mark.parametrize("case", ["hf_k2_a", "hf_k2_b"])
def test_prompt_matches_transformers(oracle, case, prompt, runtime):
    o = oracle(case)
    config, params = model(o.checkpoint, runtime)
    tokens = jnp.asarray(o.expected[f"{prompt}.input_ids"], jnp.int32)[None]
    n, layers = tokens.shape[1], tuple(range(config.num_hidden_layers))
    cache = KVCache.empty(config, 1, n, 0, runtime.cache_dtype)
    out, logits = run(params, config, tokens, jnp.arange(n, dtype=jnp.int32)[None], cache, layers, runtime)
    rows = o.expected[f"{prompt}.rows"]
    np.testing.assert_allclose(logits[0, rows], o.expected[f"{prompt}.logits"], **TARGET_LOGITS._asdict())
    taps = np.asarray(out.taps[0]).reshape(n, len(layers), -1)
    for layer in layers:
        expected = o.expected[f"{prompt}.residual.{layer}"]
        np.testing.assert_allclose(taps[rows, layer], expected, **TARGET_LOGITS._asdict(), err_msg=f"layer {layer}")
    embedded = k2.embed(params, tokens[0, rows], runtime)
    np.testing.assert_array_equal(embedded, o.expected[f"{prompt}.embed"])
    if f"{prompt}.kv_latent.0" in o.expected:
        for layer in layers:
            row = np.asarray(out.cache.latent[layer][0, :n])
            expected = np.concatenate(
                [o.expected[f"{prompt}.kv_latent.{layer}"], o.expected[f"{prompt}.k_pe_interleaved.{layer}"]], axis=-1
            )
            np.testing.assert_allclose(row, expected, **TARGET_LOGITS._asdict(), err_msg=f"cache of layer {layer}")


@pytest.mark.parametrize("prompt", ["p0", "p2"])
@pytest.mark.parametrize("case", ["hf_k2_a", "hf_k2_b"])
def test_chunked_prefill_then_greedy_decoding(oracle, case, prompt):
    """Prefill in chunks of 16, then one token at a time: the greedy continuation and its distributions."""
    o = oracle(case)
    config, params = model(o.checkpoint, CPU_EXACT)
    prompt_ids = o.expected[f"{prompt}.input_ids"].astype(np.int32)
    cache = KVCache.empty(config, 1, len(prompt_ids) + 32, 16, "float32")
    chunk = 16
    for first in range(0, len(prompt_ids), chunk):
        part = prompt_ids[first : first + chunk]
        tokens = jnp.asarray(np.pad(part, (0, chunk - len(part))))[None]
        positions = first + jnp.arange(chunk, dtype=jnp.int32)[None]
        out, logits = run(params, config, tokens, positions, cache, (), CPU_EXACT)
        cache = commit(out.cache, jnp.arange(chunk, dtype=jnp.int32)[None], jnp.asarray([len(part)], jnp.int32))
        last = logits[0, len(part) - 1]
    for i, token in enumerate(o.expected[f"{prompt}.greedy_tokens"]):
        np.testing.assert_allclose(last, o.expected[f"{prompt}.greedy_logits"][i], **TARGET_LOGITS._asdict())
        assert int(jnp.argmax(last)) == token
        step = jnp.asarray([[token]], jnp.int32)
        out, logits = run(params, config, step, cache.lengths[:, None], cache, (), CPU_EXACT)
        cache = commit(out.cache, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
        last = logits[0, 0]
