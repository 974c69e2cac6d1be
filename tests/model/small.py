"""A K2 model small enough to compile in a second, with random weights of a realistic scale."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kdjax.config import ModelConfig, YarnConfig
from kdjax.model import k2
from kdjax.model.cache import KVCache
from kdjax.model.runtime import Runtime

FLOAT32 = Runtime(compute_dtype="float32", cache_dtype="float32")
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=12,
    intermediate_size=32,
    moe_intermediate_size=16,
    n_routed_experts=6,
    num_experts_per_tok=2,
    routed_scaling_factor=2.0,
    rope_scaling=YarnConfig(factor=4.0, original_max_position_embeddings=64),
)


def random_params(config: ModelConfig, runtime: Runtime, seed: int = 0) -> k2.Params:
    rng = np.random.default_rng(seed)

    def leaf(s):
        scale = 1.0 if len(s.shape) == 1 else s.shape[-1] ** -0.5
        values = rng.standard_normal(s.shape) * scale + (1.0 if len(s.shape) == 1 else 0.0)
        return jnp.asarray(values, s.dtype)

    return jax.tree.map(leaf, k2.abstract_params(config, runtime))


@functools.partial(jax.jit, static_argnames=("config", "taps", "runtime"))
def forward(params, tokens, positions, cache, ancestors=None, n_valid=None, *, config=CONFIG, taps=(), runtime=FLOAT32):
    return k2.forward(
        params, config, tokens, positions, cache, ancestors=ancestors, n_valid=n_valid, taps=taps, runtime=runtime
    )


def prefill(params, prompts, capacity=64, tree_rows=16, *, config=CONFIG, runtime=FLOAT32):
    """One slot per prompt (padded, `n_valid`): the cache with every prompt committed, and the hidden states."""
    width = 16  # one compiled program for every prompt
    tokens = jnp.asarray([list(p) + [0] * (width - len(p)) for p in prompts], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
    lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
    cache = KVCache.empty(config, len(prompts), capacity, tree_rows, runtime.cache_dtype)
    out = forward(params, tokens, positions, cache, None, lengths, config=config, runtime=runtime)
    return KVCache(out.cache.latent, lengths), out.hidden
