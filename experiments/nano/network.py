"""The target in the form that trains fast: whole sequences, every expert in one matmul, INT4 by fake quantisation.

It computes the same function as `kdjax.model` (a test compares them); only the execution differs. With a few
small experts, masking the unchosen ones is cheaper on a GPU than dispatching tokens to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.nano.config import Attention
from kdjax.config.model import ModelConfig, YarnConfig
from kdjax.model import rope

Params = dict[str, Any]
CosSin = tuple[Float[Array, "..."], Float[Array, "..."]]


class TargetOutput(NamedTuple):
    hidden: Float[Array, "batch seq hidden"]
    residuals: list[Float[Array, "batch seq hidden"]]
    load: Float[Array, "moe_layers experts"]


def init_params(config: ModelConfig, key: Array) -> Params:
    """Random float32 master weights, named as in the checkpoint; routed experts stacked densely."""
    d, heads = config.hidden_size, config.num_attention_heads
    keys = iter(jax.random.split(key, 4 + 16 * config.num_hidden_layers))
    depth_scale = (2 * config.num_hidden_layers) ** -0.5

    def linear(*shape: int, scale: float = 1.0) -> Params:
        return {"weight": jax.random.normal(next(keys), shape) * (scale * shape[-1] ** -0.5)}

    def norm(n: int) -> Params:
        return {"weight": jnp.ones(n)}

    def mlp(width: int, *experts: int) -> Params:
        return {
            "gate_proj": linear(*experts, width, d),
            "up_proj": linear(*experts, width, d),
            "down_proj": linear(*experts, d, width, scale=depth_scale),
        }

    def layer(i: int) -> Params:
        ffn = mlp(config.intermediate_size)
        if config.is_moe(i):
            ffn = {
                "gate": linear(config.n_routed_experts, d),
                "experts": mlp(config.moe_intermediate_size, config.n_routed_experts),
                "shared_experts": mlp(config.moe_intermediate_size * config.n_shared_experts),
            }
        return {
            "input_layernorm": norm(d),
            "post_attention_layernorm": norm(d),
            "self_attn": {
                "q_a_proj": linear(config.q_lora_rank, d),
                "q_a_layernorm": norm(config.q_lora_rank),
                "q_b_proj": linear(heads * config.qk_head_dim, config.q_lora_rank),
                "kv_a_proj_with_mqa": linear(config.latent_dim, d),
                "kv_a_layernorm": norm(config.kv_lora_rank),
                "kv_b_proj": linear(heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
                "o_proj": linear(d, heads * config.v_head_dim, scale=depth_scale),
            },
            "mlp": ffn,
        }

    return {
        "embed_tokens": {"weight": jax.random.normal(next(keys), (config.vocab_size, d)) * 0.02},
        "lm_head": {"weight": jax.random.normal(next(keys), (config.vocab_size, d)) * 0.02},
        "norm": norm(d),
        "layers": {i: layer(i) for i in range(config.num_hidden_layers)},
    }


def init_router_bias(config: ModelConfig) -> Float[Array, "moe_layers experts"]:
    return jnp.zeros((config.num_hidden_layers - config.first_k_dense_replace, config.n_routed_experts))


def int4_parts(w: Float[Array, "*lead columns"], group: int) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Codes in [-8, 7] and bf16 scales of symmetric group quantisation with scale = max|group| / 7."""
    grouped = w.reshape(*w.shape[:-1], w.shape[-1] // group, group)
    scale = (jnp.max(jnp.abs(grouped), -1) / 7.0).astype(jnp.bfloat16).astype(jnp.float32)
    safe = jnp.where(scale == 0, 1.0, scale)
    return jnp.clip(jnp.round(grouped / safe[..., None]), -8, 7).reshape(w.shape), scale


def int4_values(
    codes: Float[Array, "*lead columns"], scale: Float[Array, "*lead groups"]
) -> Float[Array, "*lead columns"]:
    return codes * jnp.repeat(scale, codes.shape[-1] // scale.shape[-1], axis=-1)


def straight_through_int4(w: Float[Array, "*lead columns"], group: int) -> Float[Array, "*lead columns"]:
    return w + jax.lax.stop_gradient(int4_values(*int4_parts(w, group)) - w)


def rms_norm(x: Float[Array, "*lead n"], weight: Float[Array, " n"], eps: float) -> Float[Array, "*lead n"]:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (x32 * weight.astype(jnp.float32)).astype(x.dtype)


def cos_sin(positions: Int[Array, "*batch rows"], dim: int, theta: float, yarn: YarnConfig | None) -> CosSin:
    """Of the rotary angles, with an axis for the heads: [*batch, rows, 1, half]."""
    cos, sin = rope.cos_sin(positions, rope.inverse_frequencies(dim, theta, yarn), rope.amplitude(yarn))
    return cos[..., None, :], sin[..., None, :]


def rotate(
    rule: Callable[[Array, Array, Array], Array], x: Float[Array, "batch rows heads dim"], cos_sin: CosSin
) -> Float[Array, "batch rows heads dim"]:
    """`rule` is `rope.rotate_interleaved` or `rope.rotate_half_split`."""
    cos, sin = (jnp.broadcast_to(table, (*x.shape[:-1], table.shape[-1])) for table in cos_sin)
    return rule(x, cos, sin)


def linear(p: Params, x: Float[Array, "*lead inp"]) -> Float[Array, "*lead out"]:
    return x @ p["weight"].astype(x.dtype).T


def attention(config: ModelConfig, p: Params, x: Float[Array, "batch seq hidden"], implementation: Attention) -> Array:
    b, t, _ = x.shape
    h, nope, eps = config.num_attention_heads, config.qk_nope_head_dim, config.latent_norm_eps
    angles = cos_sin(jnp.arange(t), config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
    q = linear(p["q_b_proj"], rms_norm(linear(p["q_a_proj"], x), p["q_a_layernorm"]["weight"], eps))
    q = q.reshape(b, t, h, config.qk_head_dim)
    q = jnp.concatenate([q[..., :nope], rotate(rope.rotate_interleaved, q[..., nope:], angles)], -1)
    kv = linear(p["kv_a_proj_with_mqa"], x)
    latent = rms_norm(kv[..., : config.kv_lora_rank], p["kv_a_layernorm"]["weight"], eps)
    k_pe = rotate(rope.rotate_interleaved, kv[..., None, config.kv_lora_rank :], angles)
    kv = linear(p["kv_b_proj"], latent).reshape(b, t, h, nope + config.v_head_dim)
    k = jnp.concatenate([kv[..., :nope], jnp.broadcast_to(k_pe, (b, t, h, k_pe.shape[-1]))], -1)
    out = jax.nn.dot_product_attention(
        q,
        k,
        kv[..., nope:],
        is_causal=True,
        scale=rope.mla_softmax_scale(config.qk_head_dim, config.rope_scaling),
        implementation=implementation,
    )
    return linear(p["o_proj"], out.reshape(b, t, -1))


def swiglu(p: Params, x: Float[Array, "*lead hidden"]) -> Float[Array, "*lead hidden"]:
    return linear(p["down_proj"], jax.nn.silu(linear(p["gate_proj"], x)) * linear(p["up_proj"], x))


def route(
    config: ModelConfig, p: Params, bias: Float[Array, " experts"], x: Float[Array, "*lead hidden"]
) -> tuple[Float[Array, "*lead experts"], Bool[Array, "*lead experts"]]:
    """Dense routing weights (zero for the unchosen experts) and the chosen set."""
    weight = p["gate"]["weight"].astype(jnp.bfloat16).astype(jnp.float32)
    score = jax.nn.sigmoid(jnp.einsum("...d,ed->...e", x.astype(jnp.float32), weight, precision="highest"))
    biased = jax.lax.stop_gradient(score + bias)
    index = jnp.arange(config.n_routed_experts)
    ahead = (biased[..., None, :] > biased[..., :, None]) | (
        (biased[..., None, :] == biased[..., :, None]) & (index[None, :] < index[:, None])
    )
    chosen = jnp.sum(ahead, -1) < config.num_experts_per_tok
    w = jnp.where(chosen, score, 0.0)
    return w / (jnp.sum(w, -1, keepdims=True) + 1e-20) * config.routed_scaling_factor, chosen


def moe(
    config: ModelConfig, p: Params, bias: Float[Array, " experts"], x: Float[Array, "batch seq hidden"], int4: bool
) -> tuple[Array, Float[Array, " experts"]]:
    weights, chosen = route(config, p, bias, x)
    experts = {name: e["weight"] for name, e in p["experts"].items()}
    if int4 and config.experts_int4 is not None:
        experts = {name: straight_through_int4(e, config.experts_int4.group_size) for name, e in experts.items()}
    experts = {name: e.astype(x.dtype) for name, e in experts.items()}
    up = jnp.einsum("btd,eid->btei", x, experts["up_proj"])
    h = jax.nn.silu(jnp.einsum("btd,eid->btei", x, experts["gate_proj"])) * up * weights[..., None].astype(x.dtype)
    routed = jnp.einsum("btei,edi->btd", h, experts["down_proj"])
    load = jnp.mean(chosen.astype(jnp.float32), (0, 1))
    return routed + swiglu(p["shared_experts"], x), load


def forward(
    config: ModelConfig,
    params: Params,
    router_bias: Float[Array, "moe_layers experts"],
    tokens: Int[Array, "batch seq"],
    *,
    int4: bool,
    attention_implementation: Attention = "xla",
    dtype: jnp.dtype = jnp.bfloat16,
) -> TargetOutput:
    """Final hidden states, the residual stream after every layer, and each expert's share of the tokens."""
    x = params["embed_tokens"]["weight"].astype(dtype)[tokens]
    residuals, loads = [], []
    for i in range(config.num_hidden_layers):
        p = params["layers"][i]
        normed = rms_norm(x, p["input_layernorm"]["weight"], config.rms_norm_eps)
        x = x + attention(config, p["self_attn"], normed, attention_implementation)
        normed = rms_norm(x, p["post_attention_layernorm"]["weight"], config.rms_norm_eps)
        if config.is_moe(i):
            out, load = moe(config, p["mlp"], router_bias[i - config.first_k_dense_replace], normed, int4)
            loads.append(load)
        else:
            out = swiglu(p["mlp"], normed)
        x = x + out
        residuals.append(x)
    return TargetOutput(rms_norm(x, params["norm"]["weight"], config.rms_norm_eps), residuals, jnp.stack(loads))


def logits(params: Params, hidden: Float[Array, "*lead hidden"]) -> Float[Array, "*lead vocab"]:
    weight = params["lm_head"]["weight"].astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)


def freeze(config: ModelConfig, params: Params, router_bias: Float[Array, "moe_layers experts"]) -> Params:
    """What the checkpoint holds: bf16 weights, experts as `codes` (int8) and `scale` (bf16), float32 router bias."""
    assert config.experts_int4 is not None
    group = config.experts_int4.group_size
    frozen: Params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    for i in range(config.first_k_dense_replace, config.num_hidden_layers):
        for name, expert in params["layers"][i]["mlp"]["experts"].items():
            codes, scale = int4_parts(expert["weight"], group)
            frozen["layers"][i]["mlp"]["experts"][name] = {
                "codes": codes.astype(jnp.int8),
                "scale": scale.astype(jnp.bfloat16),
            }
        frozen["layers"][i]["mlp"]["gate"]["e_score_correction_bias"] = router_bias[i - config.first_k_dense_replace]
    return frozen


def thaw(config: ModelConfig, frozen: Params) -> tuple[Params, Float[Array, "moe_layers experts"]]:
    """The inverse of `freeze` with bf16 weights: what the drafter trains against. `int4=False` from here on."""
    layers, bias = {}, []
    for i, layer in frozen["layers"].items():
        layers[i] = dict(layer)
        if config.is_moe(i):
            mlp = dict(layer["mlp"])
            bias.append(np.asarray(mlp["gate"]["e_score_correction_bias"], np.float32))
            mlp["gate"] = {"weight": mlp["gate"]["weight"]}
            mlp["experts"] = {
                n: {
                    "weight": int4_values(e["codes"].astype(jnp.float32), e["scale"].astype(jnp.float32)).astype(
                        jnp.bfloat16
                    )
                }
                for n, e in mlp["experts"].items()
            }
            layers[i]["mlp"] = mlp
    return {**frozen, "layers": layers}, jnp.asarray(np.stack(bias))
