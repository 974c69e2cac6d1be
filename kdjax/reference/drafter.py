"""The DFlash drafter: one forward over a block of [bonus, MASK ...] against features of the target's own layers.

Layers are Qwen3-style (grouped queries, a norm on each query and key head, half-split rotation of the whole head).
Keys and values of the context come from the target's taps, not from the drafter's own stream, so they are computed
once per committed token and shared by every later block; those of the block are dropped after it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from kdjax.config import DrafterConfig
from kdjax.reference import rope
from kdjax.reference.model import einsum, linear, rms_norm, softmax, swiglu

Params = dict[Any, Any]


class Context(NamedTuple):
    """Keys (normed and rotated) and values of the committed tokens, row p for absolute position p."""

    k: Float64[np.ndarray, "layers rows kv_heads head_dim"]
    v: Float64[np.ndarray, "layers rows kv_heads head_dim"]

    def extended(self, new: Context) -> Context:
        """With the rows of `new` behind."""
        return Context(np.concatenate([self.k, new.k], axis=1), np.concatenate([self.v, new.v], axis=1))


def empty_context(config: DrafterConfig) -> Context:
    """The context of no token."""
    shape = (config.num_hidden_layers, 0, config.num_key_value_heads, config.head_dim)
    return Context(np.zeros(shape), np.zeros(shape))


def features(
    params: Params, config: DrafterConfig, taps: Float[np.ndarray, "m taps"]
) -> Float64[np.ndarray, "m hidden"]:
    """hidden_norm(fc(taps)); taps are the target's un-normed streams after `target_layer_ids`, side by side."""
    projected = linear(params["fc"], taps.astype(np.float64))
    return rms_norm(projected, params["hidden_norm"]["weight"], config.rms_norm_eps)


def context(
    params: Params, config: DrafterConfig, taps: Float[np.ndarray, "m taps"], positions: Int[np.ndarray, "m"]
) -> Context:
    """Context rows of m tokens. Every layer reads the same features, without its input_layernorm."""
    x = features(params, config, taps)
    rows = [_keys_values(params["layers"][i]["self_attn"], config, x, positions) for i in range(len(params["layers"]))]
    return Context(np.stack([k for k, _ in rows]), np.stack([v for _, v in rows]))


def visible(config: DrafterConfig, layer: int, start: int) -> Bool[np.ndarray, "block {start}+block"]:
    """Which keys (context positions 0 .. start-1, then the block) each block position sees.

    Full layers see the whole context, sliding ones a context key at distance less than `sliding_window`. Inside the
    block sliding layers are causal and full ones are not, unless the config key `is_causal` says otherwise for all.
    """
    query = start + np.arange(config.block_size)[:, None]
    key = np.arange(start + config.block_size)
    sees = np.ones((config.block_size, len(key)), bool)
    if config.layer_types[layer] == "sliding_attention" and config.sliding_window is not None:
        sees &= (key >= start) | (query - key < config.sliding_window)
    if config.causal_in_block(layer):
        sees &= key <= query
    return sees


def draft(
    params: Params, config: DrafterConfig, embeddings: Float[np.ndarray, "block hidden"], start: int, context: Context
) -> Float64[np.ndarray, "block hidden"]:
    """Hidden states of the block at positions start .. start+block-1, after the final norm.

    `embeddings` are the target's, of [bonus, MASK ...]. Row j, through the target's lm_head, is the distribution of the
    token AT position start + j (no shift); row 0 is the bonus and predicts nothing.
    """
    positions = start + np.arange(config.block_size)
    rotation = rope.cos_sin(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    group = config.num_attention_heads // config.num_key_value_heads
    x = embeddings.astype(np.float64)
    for i in range(config.num_hidden_layers):
        p = params["layers"][i]
        attn = p["self_attn"]
        a = rms_norm(x, p["input_layernorm"]["weight"], config.rms_norm_eps)
        q = linear(attn["q_proj"], a).reshape(len(x), config.num_attention_heads, config.head_dim)
        q = rope.rotate_half_split(rms_norm(q, attn["q_norm"]["weight"], config.rms_norm_eps), *rotation)
        k, v = _keys_values(attn, config, a, positions)
        keys = np.repeat(np.concatenate([context.k[i], k]), group, axis=1)
        values = np.repeat(np.concatenate([context.v[i], v]), group, axis=1)
        scores = einsum("qhd,thd->hqt", q, keys) * config.head_dim**-0.5
        weights = softmax(np.where(visible(config, i, start), scores, -np.inf))
        x = x + linear(attn["o_proj"], einsum("hqt,thd->qhd", weights, values).reshape(len(x), -1))
        x = x + swiglu(p["mlp"], rms_norm(x, p["post_attention_layernorm"]["weight"], config.rms_norm_eps))
    return rms_norm(x, params["norm"]["weight"], config.rms_norm_eps)


def _keys_values(
    p: Params, config: DrafterConfig, x: np.ndarray, positions: np.ndarray
) -> tuple[Float64[np.ndarray, "m kv_heads head_dim"], Float64[np.ndarray, "m kv_heads head_dim"]]:
    shape = (len(x), config.num_key_value_heads, config.head_dim)
    k = rms_norm(linear(p["k_proj"], x).reshape(shape), p["k_norm"]["weight"], config.rms_norm_eps)
    rotation = rope.cos_sin(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    return rope.rotate_half_split(k, *rotation), linear(p["v_proj"], x).reshape(shape)
