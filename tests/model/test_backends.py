"""The whole model with the attention kernel in interpret mode against the plain-JAX backend."""

from __future__ import annotations

import jax.numpy as jnp
import msgspec
import numpy as np

from kdjax.model.cache import KVCache
from kdjax.model.mla import PREFILL_TOKENS
from tests.model.small import CONFIG, FLOAT32, forward, prefill, random_params
from tests.tolerances import SAME_MODEL_FLOAT32

DENSE = msgspec.structs.replace(CONFIG, first_k_dense_replace=CONFIG.num_hidden_layers)


def test_interpret_backend_verifies_a_tree_like_xla():
    """Two ragged streams: one with a tree of five tokens, one with three of them and two of padding."""
    parents = [-1, 0, 0, 1, 1]
    mask = np.eye(5, dtype=bool)
    for i, parent in enumerate(parents[1:], start=1):
        mask[i] |= mask[parent]
    depths = mask.sum(-1) - 1
    hidden = []
    for backend in ("xla", "interpret"):
        runtime = msgspec.structs.replace(FLOAT32, backend=backend)
        params = random_params(DENSE, runtime)
        cache, _ = prefill(params, [range(1, 12), range(20, 24)], config=DENSE, runtime=runtime)
        out = forward(
            params,
            jnp.asarray([[3, 9, 8, 7, 7], [1, 2, 3, 0, 0]], jnp.int32),
            cache.lengths[:, None] + jnp.asarray(depths, jnp.int32)[None, :],
            cache,
            jnp.asarray(np.stack([mask, mask])),
            jnp.asarray([5, 3], jnp.int32),
            config=DENSE,
            runtime=runtime,
        )
        hidden.append(np.asarray(out.hidden))
    SAME_MODEL_FLOAT32.check(hidden[1][0], hidden[0][0])
    SAME_MODEL_FLOAT32.check(hidden[1][1, :3], hidden[0][1, :3])


def test_interpret_backend_reads_a_long_prompt_like_xla():
    """A chunk long enough for the prefill kernel, on a prefix of 40 tokens."""
    n, start = PREFILL_TOKENS, 40
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, DENSE.vocab_size, (1, n)), jnp.int32)
    hidden = []
    for backend in ("xla", "interpret"):
        runtime = msgspec.structs.replace(FLOAT32, backend=backend)
        cache = KVCache.empty(DENSE, 1, start + n, 0, runtime.cache_dtype)
        prefix = jnp.asarray(np.random.default_rng(1).standard_normal(cache.latent[0].shape), jnp.float32)
        cache = KVCache(tuple(prefix for _ in cache.latent), jnp.asarray([start], jnp.int32))
        positions = start + jnp.arange(n, dtype=jnp.int32)[None, :]
        params = random_params(DENSE, runtime)
        hidden.append(np.asarray(forward(params, tokens, positions, cache, config=DENSE, runtime=runtime).hidden))
    SAME_MODEL_FLOAT32.check(hidden[1], hidden[0])
