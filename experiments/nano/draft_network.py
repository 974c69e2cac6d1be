"""The DFlash drafter in training form: many blocks per sequence against one pass of context features.

Computes the same function as `kdjax.drafter` (a test compares them).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.nano.network import CosSin, cos_sin, linear, rms_norm, rotate, swiglu
from kdjax.config.model import DrafterConfig
from kdjax.model import rope

Params = dict[str, Any]


def init_params(config: DrafterConfig, key: Array) -> Params:
    """Random float32 weights, named as in the checkpoint (no embedding, no head)."""
    d, hd = config.hidden_size, config.head_dim
    keys = iter(jax.random.split(key, 1 + 7 * config.num_hidden_layers))
    depth_scale = (2 * config.num_hidden_layers) ** -0.5

    def linear_init(out: int, inp: int, scale: float = 1.0) -> Params:
        return {"weight": jax.random.normal(next(keys), (out, inp)) * (scale * inp**-0.5)}

    def norm(n: int) -> Params:
        return {"weight": jnp.ones(n)}

    def layer() -> Params:
        return {
            "input_layernorm": norm(d),
            "post_attention_layernorm": norm(d),
            "self_attn": {
                "q_proj": linear_init(config.num_attention_heads * hd, d),
                "k_proj": linear_init(config.num_key_value_heads * hd, d),
                "v_proj": linear_init(config.num_key_value_heads * hd, d),
                "o_proj": linear_init(d, config.num_attention_heads * hd, depth_scale),
                "q_norm": norm(hd),
                "k_norm": norm(hd),
            },
            "mlp": {
                "gate_proj": linear_init(config.intermediate_size, d),
                "up_proj": linear_init(config.intermediate_size, d),
                "down_proj": linear_init(d, config.intermediate_size, depth_scale),
            },
        }

    return {
        "fc": linear_init(d, d * len(config.target_layer_ids)),
        "hidden_norm": norm(d),
        "norm": norm(d),
        "layers": {i: layer() for i in range(config.num_hidden_layers)},
    }


def visibility(
    config: DrafterConfig, layer: int, anchors: Int[Array, "batch blocks"], seq: int
) -> tuple[Bool[Array, "batch blocks slot seq"], Bool[Array, "slot slot"]]:
    """Context rows strictly before the anchor (inside the window in sliding layers); slots of the same block."""
    slot = jnp.arange(config.block_size)
    context = jnp.broadcast_to(jnp.arange(seq) < anchors[..., None, None], (*anchors.shape, config.block_size, seq))
    if config.layer_types[layer] == "sliding_attention":
        assert config.sliding_window is not None
        position = anchors[..., None] + slot
        context &= position[..., None] - jnp.arange(seq) < config.sliding_window
    inside = jnp.ones((config.block_size, config.block_size), bool)
    return context, (slot[None, :] <= slot[:, None]) if config.causal_in_block(layer) else inside


def forward(
    config: DrafterConfig,
    params: Params,
    taps: Float[Array, "batch seq features"],
    anchors: Int[Array, "batch blocks"],
    block_embeddings: Float[Array, "batch blocks slot hidden"],
) -> Float[Array, "batch blocks slots_but_first hidden"]:
    """Final hidden states of slots 1.. of every block; slot k predicts the token at anchor + k."""
    b, seq, _ = taps.shape
    n, size = anchors.shape[1], config.block_size
    heads, kv_heads, hd = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    group = heads // kv_heads
    positions = (anchors[..., None] + jnp.arange(size)).reshape(b, n * size)
    seq_angles = cos_sin(jnp.arange(seq), hd, config.rope_theta, config.rope_scaling)
    block_angles = cos_sin(positions, hd, config.rope_theta, config.rope_scaling)

    context = rms_norm(linear(params["fc"], taps), params["hidden_norm"]["weight"], config.rms_norm_eps)
    h = block_embeddings.reshape(b, n * size, -1)
    for i in range(config.num_hidden_layers):
        p = params["layers"][i]
        attn = p["self_attn"]

        def keys(x: Array, angles: CosSin, attn: Params = attn) -> Array:
            k = linear(attn["k_proj"], x).reshape(b, -1, kv_heads, hd)
            k = rms_norm(k, attn["k_norm"]["weight"], config.rms_norm_eps)
            return rotate(rope.rotate_half_split, k, angles)

        a = rms_norm(h, p["input_layernorm"]["weight"], config.rms_norm_eps)
        q = rms_norm(linear(attn["q_proj"], a).reshape(b, -1, heads, hd), attn["q_norm"]["weight"], config.rms_norm_eps)
        q = rotate(rope.rotate_half_split, q, block_angles).reshape(b, n, size, kv_heads, group, hd)
        k_seq, k_block = keys(context, seq_angles), keys(a, block_angles).reshape(b, n, size, kv_heads, hd)
        v_seq = linear(attn["v_proj"], context).reshape(b, seq, kv_heads, hd)
        v_block = linear(attn["v_proj"], a).reshape(b, n, size, kv_heads, hd)
        see_context, see_block = visibility(config, i, anchors, seq)
        s_seq = jnp.einsum("bnqkgd,bskd->bkgnqs", q, k_seq, preferred_element_type=jnp.float32)
        s_block = jnp.einsum("bnqkgd,bnpkd->bkgnqp", q, k_block, preferred_element_type=jnp.float32)
        s_seq = jnp.where(see_context[:, None, None], s_seq * hd**-0.5, -jnp.inf)
        s_block = jnp.where(see_block, s_block * hd**-0.5, -jnp.inf)
        w = jax.nn.softmax(jnp.concatenate([s_seq, s_block], -1), -1).astype(h.dtype)
        out = jnp.einsum("bkgnqs,bskd->bnqkgd", w[..., :seq], v_seq)
        out = out + jnp.einsum("bkgnqp,bnpkd->bnqkgd", w[..., seq:], v_block)
        h = h + linear(attn["o_proj"], out.reshape(b, n * size, -1))
        h = h + swiglu(p["mlp"], rms_norm(h, p["post_attention_layernorm"]["weight"], config.rms_norm_eps))
    h = rms_norm(h, params["norm"]["weight"], config.rms_norm_eps)
    return h.reshape(b, n, size, -1)[:, :, 1:]
