"""The DFlash drafter ("DFlash: block diffusion for flash speculative decoding") as pure functions.

One forward over the block [bonus, MASK, ...] drafts all its tokens at once. Keys and values of the context are made
from the target's own hidden states (taps), not from the drafter's stream, so they are computed once per committed
token; those of the block are temporary. Embeddings and lm_head are the target's.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from kdjax.config import DrafterConfig
from kdjax.drafter.attention import attend
from kdjax.drafter.cache import DraftCache
from kdjax.model import rope
from kdjax.model.experts import MLP
from kdjax.model.linear import Linear
from kdjax.model.norm import RMSNorm
from kdjax.model.runtime import Runtime

Params = dict[str, Any]
CosSin = tuple[Float[Array, "slots n half"], Float[Array, "slots n half"]]


def rotate(x: Float[Array, "slots n heads head_dim"], cos_sin: CosSin) -> Float[Array, "slots n heads head_dim"]:
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    cos, sin = (jnp.broadcast_to(a[:, :, None, :], shape) for a in cos_sin)
    return rope.rotate_half_split(x, cos, sin)


class Attention(nnx.Module):
    def __init__(self, config: DrafterConfig, layer: int, dtype: jnp.dtype):
        c = config
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.head_dim = c.head_dim
        self.causal = c.causal_in_block(layer)
        self.window = c.window(layer)
        self.q_proj = Linear(c.hidden_size, queries, dtype)
        self.k_proj = Linear(c.hidden_size, keys, dtype)
        self.v_proj = Linear(c.hidden_size, keys, dtype)
        self.o_proj = Linear(queries, c.hidden_size, dtype)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype)

    def heads(self, x: Float[Array, "slots n width"]) -> Float[Array, "slots n heads head_dim"]:
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def keys_values(
        self, x: Float[Array, "slots n hidden"], cos_sin: CosSin
    ) -> tuple[Float[Array, "slots n kv_heads head_dim"], Float[Array, "slots n kv_heads head_dim"]]:
        """The same projections serve context features and block."""
        return rotate(self.k_norm(self.heads(self.k_proj(x))), cos_sin), self.heads(self.v_proj(x))

    def __call__(
        self,
        x: Float[Array, "slots block hidden"],
        cos_sin: CosSin,
        context_k: Float[Array, "slots rows kv_heads head_dim"],
        context_v: Float[Array, "slots rows kv_heads head_dim"],
        start: Int32[Array, "slots"],
    ) -> Float[Array, "slots block hidden"]:
        query = rotate(self.q_norm(self.heads(self.q_proj(x))), cos_sin)
        k, v = self.keys_values(x, cos_sin)
        out = attend(query, k, v, context_k, context_v, start, causal=self.causal, window=self.window)
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class Layer(nnx.Module):
    def __init__(self, config: DrafterConfig, layer: int, dtype: jnp.dtype):
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.self_attn = Attention(c, layer, dtype)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, dtype)


class DFlash(nnx.Module):
    def __init__(self, config: DrafterConfig, dtype: jnp.dtype):
        c = config
        self.fc = Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size, dtype)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.layers = nnx.List([Layer(c, i, dtype) for i in range(c.num_hidden_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)


@functools.lru_cache(maxsize=16)
def _split(config: DrafterConfig, runtime: Runtime) -> tuple[Any, Any]:
    """The graph definition and the abstract state."""
    return nnx.split(nnx.eval_shape(lambda: DFlash(config, runtime.dtype)))


def abstract_params(config: DrafterConfig, runtime: Runtime) -> Params:
    """The params as `jax.ShapeDtypeStruct` leaves: what a loader must deliver."""
    return nnx.to_pure_dict(_split(config, runtime)[1])


def _cos_sin(config: DrafterConfig, positions: Int32[Array, "slots n"]) -> CosSin:
    inv_freq = rope.inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    return rope.cos_sin(positions, inv_freq, rope.amplitude(config.rope_scaling))


def features(
    params: Params, config: DrafterConfig, taps: Float[Array, "slots n tapped"], runtime: Runtime
) -> Float[Array, "slots n hidden"]:
    """hidden_norm(fc(taps)), which every layer reads without its input_layernorm."""
    drafter = nnx.merge(_split(config, runtime)[0], params)
    return drafter.hidden_norm(drafter.fc(taps.astype(runtime.dtype)))


def context(
    params: Params,
    config: DrafterConfig,
    taps: Float[Array, "slots n tapped"],
    positions: Int32[Array, "slots n"],
    runtime: Runtime,
) -> tuple[
    Float[Array, "layers slots n kv_heads head_dim"],
    Float[Array, "layers slots n kv_heads head_dim"],
]:
    """Keys (normed and rotated) and values of newly committed tokens, for `append`.

    Args:
        params: see `abstract_params`.
        config: static.
        taps: the target's un-normed residual streams after `target_layer_ids`, side by side in that order.
        positions: absolute positions of the tokens.
        runtime: static.
    """
    drafter = nnx.merge(_split(config, runtime)[0], params)
    x = features(params, config, taps, runtime)
    cos_sin = _cos_sin(config, positions)
    k, v = zip(*(layer.self_attn.keys_values(x, cos_sin) for layer in drafter.layers), strict=True)
    return jnp.stack(k), jnp.stack(v)


def block_tokens(config: DrafterConfig, bonus: Int32[Array, "slots"]) -> Int32[Array, "slots block"]:
    """[bonus, MASK, ..., MASK]: the newest committed token, which the target has not run yet, then what to fill in.

    The block always has the length that the drafter was trained on, whatever the budget of the tree.
    """
    masks = jnp.full((len(bonus), config.block_size - 1), config.mask_token_id, jnp.int32)
    return jnp.concatenate([bonus[:, None], masks], axis=1)


def draft(
    params: Params,
    config: DrafterConfig,
    block_embeddings: Float[Array, "slots block hidden"],
    start: Int32[Array, "slots"],
    cache: DraftCache,
    runtime: Runtime,
) -> Float[Array, "slots block-1 hidden"]:
    """Hidden states of the drafted slots after the final norm, ready for the target's lm_head.

    Args:
        params: see `abstract_params`.
        config: static.
        block_embeddings: the target's embeddings, unscaled, of `block_tokens`.
        start: committed tokens per slot, which is the position of the bonus token; context rows below it are read.
        cache: the context. The block's own keys and values do not enter it.
        runtime: static.

    Returns:
        Row j belongs to block slot j + 1 and predicts the token at position start + j + 1 (no shift by one).
    """
    drafter = nnx.merge(_split(config, runtime)[0], params)
    block = jnp.arange(config.block_size, dtype=jnp.int32)
    cos_sin = _cos_sin(config, start[:, None] + block[None, :])
    x = block_embeddings.astype(runtime.dtype)
    for i, layer in enumerate(drafter.layers):
        with jax.named_scope(f"drafter_layer_{i}"):
            x = x + layer.self_attn(layer.input_layernorm(x), cos_sin, cache.k[i], cache.v[i], start)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
    return drafter.norm(x)[:, 1:]
