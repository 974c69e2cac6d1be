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
from jax import lax
from jaxtyping import Array, Float, Int32

from kdjax.config import DrafterConfig
from kdjax.drafter.cache import DraftCache
from kdjax.model import parallel, rope
from kdjax.model.experts import MLP
from kdjax.model.fused import FusedMLP, fuse_mlp, side_by_side
from kdjax.model.linear import Linear, WeightFirstLinear
from kdjax.model.norm import RMSNorm
from kdjax.model.runtime import Runtime
from kdjax.model.structure import split
from pallas_kernels.draft_attention import draft_attention

Params = dict[str, Any]
CosSin = tuple[Float[Array, "slots n half"], Float[Array, "slots n half"]]


def rotate(x: Float[Array, "slots n heads head_dim"], cos_sin: CosSin) -> Float[Array, "slots n heads head_dim"]:
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    cos, sin = (jnp.broadcast_to(a[:, :, None, :], shape) for a in cos_sin)
    return rope.rotate_half_split(x, cos, sin)


class Attention(nnx.Module):
    """Attention of one layer, but for the projections around it, which differ in how a layout holds them."""

    o_proj: Linear

    def __init__(self, config: DrafterConfig, layer: int, runtime: Runtime):
        c, dtype = config, runtime.dtype
        self.backend = runtime.backend
        self.head_dim = c.head_dim
        self.queries, self.keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.causal = c.causal_in_block(layer)
        self.window = c.window(layer)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype)

    def project(
        self, x: Float[Array, "slots n hidden"]
    ) -> tuple[Float[Array, "slots n queries"], Float[Array, "slots n keys"], Float[Array, "slots n keys"]]:
        raise NotImplementedError

    def heads(self, x: Float[Array, "slots n width"]) -> Float[Array, "slots n heads head_dim"]:
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def keys_values(
        self, k: Float[Array, "slots n keys"], v: Float[Array, "slots n keys"], cos_sin: CosSin
    ) -> tuple[Float[Array, "slots n kv_heads head_dim"], Float[Array, "slots n kv_heads head_dim"]]:
        """From projections, be they of context features or of the block."""
        return rotate(self.k_norm(self.heads(k)), cos_sin), self.heads(v)

    def __call__(
        self,
        x: Float[Array, "slots block hidden"],
        cos_sin: CosSin,
        context_k: Float[Array, "slots rows kv_heads head_dim"],
        context_v: Float[Array, "slots rows kv_heads head_dim"],
        start: Int32[Array, "slots"],
    ) -> Float[Array, "slots block hidden"]:
        q, k, v = self.project(x)
        query = rotate(self.q_norm(self.heads(q)), cos_sin)
        k, v = self.keys_values(k, v, cos_sin)
        seen: dict[str, Any] = {"causal": self.causal, "window": self.window}
        out = draft_attention(query, k, v, context_k, context_v, start, **seen, backend=self.backend)
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class PlainAttention(Attention):
    def __init__(self, config: DrafterConfig, layer: int, runtime: Runtime):
        super().__init__(config, layer, runtime)
        dtype = runtime.dtype
        hidden = config.hidden_size
        self.q_proj = Linear(hidden, self.queries, dtype)
        self.k_proj = Linear(hidden, self.keys, dtype)
        self.v_proj = Linear(hidden, self.keys, dtype)
        self.o_proj = Linear(self.queries, hidden, dtype)

    def project(
        self, x: Float[Array, "slots n hidden"]
    ) -> tuple[Float[Array, "slots n queries"], Float[Array, "slots n keys"], Float[Array, "slots n keys"]]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class FusedAttention(Attention):
    def __init__(self, config: DrafterConfig, layer: int, runtime: Runtime):
        super().__init__(config, layer, runtime)
        dtype = runtime.dtype
        self.qkv_proj = WeightFirstLinear(config.hidden_size, self.queries + 2 * self.keys, dtype)
        self.o_proj = WeightFirstLinear(self.queries, config.hidden_size, dtype)

    def project(
        self, x: Float[Array, "slots n hidden"]
    ) -> tuple[Float[Array, "slots n queries"], Float[Array, "slots n keys"], Float[Array, "slots n keys"]]:
        q, k, v = jnp.split(self.qkv_proj(x), (self.queries, self.queries + self.keys), axis=-1)
        return q, k, v


class Layer(nnx.Module):
    def __init__(self, config: DrafterConfig, layer: int, runtime: Runtime):
        c, dtype = config, runtime.dtype
        fused = runtime.layout == "fused"
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.self_attn = (FusedAttention if fused else PlainAttention)(c, layer, runtime)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.mlp = (FusedMLP if fused else MLP)(c.hidden_size, c.intermediate_size, dtype)


class DFlash(nnx.Module):
    def __init__(self, config: DrafterConfig, runtime: Runtime):
        c, dtype = config, runtime.dtype
        taps = len(c.target_layer_ids) * c.hidden_size
        self.fc = (WeightFirstLinear if runtime.layout == "fused" else Linear)(taps, c.hidden_size, dtype)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.layers = nnx.List([Layer(c, i, runtime) for i in range(c.num_hidden_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)


@functools.lru_cache(maxsize=16)
def _split(config: DrafterConfig, runtime: Runtime) -> tuple[Any, Any]:
    """The graph definition and the abstract state."""
    return split(lambda: DFlash(config, runtime))


def abstract_params(config: DrafterConfig, runtime: Runtime) -> Params:
    """The params as `jax.ShapeDtypeStruct` leaves: what a loader must deliver."""
    return nnx.to_pure_dict(_split(config, runtime)[1])


def arrange(params: Params, runtime: Runtime) -> Params:
    """Params as a checkpoint has them, in the layout that `runtime` runs. A loader's last step."""
    if runtime.layout != "fused":
        return params
    layers = {}
    for i, layer in params["layers"].items():
        q, k, v = (layer["self_attn"][name]["weight"] for name in ("q_proj", "k_proj", "v_proj"))
        norms = {name: layer["self_attn"][name] for name in ("q_norm", "k_norm")}
        attn = {**norms, "qkv_proj": side_by_side(q, k, v), "o_proj": layer["self_attn"]["o_proj"]}
        layers[i] = {**layer, "self_attn": attn, "mlp": fuse_mlp(layer["mlp"])}
    return {**params, "layers": layers}


def _cos_sin(config: DrafterConfig, positions: Int32[Array, "slots n"]) -> CosSin:
    inv_freq = rope.inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    return rope.cos_sin(positions, inv_freq, rope.amplitude(config.rope_scaling))


def features(
    params: Params, config: DrafterConfig, taps: Float[Array, "slots n tapped"], runtime: Runtime
) -> Float[Array, "slots n hidden"]:
    """hidden_norm(fc(taps)), which every layer reads without its input_layernorm."""
    drafter = nnx.merge(_split(config, runtime)[0], params)
    own = drafter.fc(taps.astype(runtime.dtype))
    return drafter.hidden_norm(parallel.gather_last(own, runtime.mesh.drafter_axes, config.hidden_size))


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
    # Seen as one value, `x` would make XLA join the projections of all layers, and their weights, in every call.
    own = (
        [lax.optimization_barrier(x) for _ in drafter.layers] if runtime.backend != "xla" else [x] * len(drafter.layers)
    )
    attns = [layer.self_attn for layer in drafter.layers]
    k, v = zip(*(a.keys_values(*a.project(x)[1:], cos_sin) for a, x in zip(attns, own, strict=True)), strict=True)
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
            attended = layer.self_attn(layer.input_layernorm(x), cos_sin, cache.k[i], cache.v[i], start)
            x = x + parallel.total(attended, runtime.mesh.drafter_axes)
            moved = layer.mlp(layer.post_attention_layernorm(x))
            x = x + parallel.total(moved, runtime.mesh.drafter_axes)
    return drafter.norm(x)[:, 1:]
