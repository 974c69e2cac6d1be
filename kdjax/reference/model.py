"""The Kimi-K2 / DeepSeek-V3 text model: multi-head latent attention and a sigmoid-routed mixture of experts.

Formulas: DeepSeek-V2 (arXiv 2405.04434) section 2.1 for the attention, DeepSeek-V3 (arXiv 2412.19437) section 2.1.2 for
the router. Linear weights are [out, in].
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from kdjax.config import ModelConfig
from kdjax.reference import rope

Params = dict[Any, Any]
Attention = Literal["absorbed", "materialised"]

einsum = functools.partial(np.einsum, optimize=True)  # through BLAS where it can


class Routing(NamedTuple):
    """Of one layer: raw router logits, the chosen experts (descending biased score) and their weights."""

    logits: Float64[np.ndarray, "q experts"]
    experts: Int[np.ndarray, "q k"]
    weights: Float64[np.ndarray, "q k"]


class Forward(NamedTuple):
    """`residual[i]` is the un-normed stream after layer i, `cache` the past rows followed by the q new ones."""

    hidden: Float64[np.ndarray, "q hidden"]
    residual: Float64[np.ndarray, "layers q hidden"]
    cache: Float64[np.ndarray, "layers rows latent"]
    routing: dict[int, Routing]

    def taps(self, layers: tuple[int, ...]) -> Float64[np.ndarray, "q taps"]:
        """What the drafter reads: the streams after the given layers, side by side in that order."""
        streams = self.residual[np.array(layers, int)]
        return np.moveaxis(streams, 0, 1).reshape(streams.shape[1], -1)


def empty_cache(config: ModelConfig) -> Float64[np.ndarray, "layers rows latent"]:
    """The cache of no token: rows is 0."""
    return np.zeros((config.num_hidden_layers, 0, config.latent_dim))


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[np.ndarray, "q"],
    positions: Int[np.ndarray, "q"],
    cache: Float64[np.ndarray, "layers past latent"],
    ancestors: Bool[np.ndarray, "q q"] | None = None,
    attention: Attention = "absorbed",
) -> Forward:
    """Runs q tokens after the cached ones.

    Every token sees all cached rows; `ancestors[i, j]` says whether token i sees new token j, None is the causal chain.
    """
    q = len(tokens)
    new = np.tri(q, dtype=bool) if ancestors is None else ancestors
    visible = np.concatenate([np.ones((q, cache.shape[1]), bool), new], axis=1)

    x = params["embed_tokens"]["weight"][tokens]
    residual, rows, routing = [], [], {}
    for i in range(config.num_hidden_layers):
        p = params["layers"][i]
        attended, layer_rows = mla(
            p["self_attn"],
            config,
            rms_norm(x, p["input_layernorm"]["weight"], config.rms_norm_eps),
            positions,
            cache[i],
            visible,
            attention,
        )
        x = x + attended
        h = rms_norm(x, p["post_attention_layernorm"]["weight"], config.rms_norm_eps)
        if config.is_moe(i):
            moved, routing[i] = moe(p["mlp"], config, h)
        else:
            moved = swiglu(p["mlp"], h)
        x = x + moved
        residual.append(x)
        rows.append(layer_rows)
    hidden = rms_norm(x, params["norm"]["weight"], config.rms_norm_eps)
    return Forward(hidden, np.stack(residual), np.stack(rows), routing)


def logits(params: Params, hidden: Float64[np.ndarray, "q hidden"]) -> Float64[np.ndarray, "q vocab"]:
    """lm_head of hidden states after the final norm."""
    return linear(params["lm_head"], hidden)


def softmax_scale(config: ModelConfig) -> float:
    """1/sqrt(head dim) times m(mscale_all_dim)^2, YaRN's attention temperature as DeepSeek applies it."""
    yarn = config.rope_scaling
    mscale = rope.yarn_mscale(yarn.factor, yarn.mscale_all_dim) if yarn else 1.0
    return config.qk_head_dim**-0.5 * mscale**2


def mla(
    p: Params,
    config: ModelConfig,
    x: Float64[np.ndarray, "q hidden"],
    positions: Int[np.ndarray, "q"],
    past: Float64[np.ndarray, "past latent"],
    visible: Bool[np.ndarray, "q past+q"],
    attention: Attention,
) -> tuple[Float64[np.ndarray, "q hidden"], Float64[np.ndarray, "rows latent"]]:
    """Multi-head latent attention (DeepSeek-V2 eq. 9 to 19) and all cache rows.

    A cache row is [c | k_pe]: the latent after its norm and the one key all heads share, after rotation. "materialised"
    expands c to a key and a value per head; "absorbed" moves those matrices to the query and the output instead, so
    that attention runs on the latent itself. Both are the same function.
    """
    heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    eps = config.latent_norm_eps
    rotation = rope.cos_sin(positions, config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)

    q = linear(p["q_b_proj"], rms_norm(linear(p["q_a_proj"], x), p["q_a_layernorm"]["weight"], eps))
    q_nope, q_pe = np.split(q.reshape(len(x), heads, config.qk_head_dim), [nope], axis=-1)
    q_pe = rope.rotate_interleaved(q_pe, *rotation)

    c, k_pe = np.split(linear(p["kv_a_proj_with_mqa"], x), [rank], axis=-1)
    c = rms_norm(c, p["kv_a_layernorm"]["weight"], eps)
    new_rows = np.concatenate([c, rope.rotate_interleaved(k_pe, *rotation)], axis=-1)
    rows = np.concatenate([past, new_rows])
    c, k_pe = np.split(rows, [rank], axis=-1)

    kv_b = p["kv_b_proj"]["weight"].reshape(heads, nope + config.v_head_dim, rank)
    w_uk, w_uv = kv_b[:, :nope], kv_b[:, nope:]
    if attention == "materialised":
        scores = einsum("qhn,htn->hqt", q_nope, einsum("tr,hnr->htn", c, w_uk))
    else:
        scores = einsum("qhn,hnr->hqr", q_nope, w_uk) @ c.T
    scores = scores + einsum("qhp,tp->hqt", q_pe, k_pe)
    weights = softmax(np.where(visible, scores * softmax_scale(config), -np.inf))
    if attention == "materialised":
        out = einsum("hqt,htv->qhv", weights, einsum("tr,hvr->htv", c, w_uv))
    else:
        out = einsum("hqr,hvr->qhv", weights @ c, w_uv)
    return linear(p["o_proj"], out.reshape(len(x), -1)), rows


def route(
    router_logits: Float[np.ndarray, "q experts"],
    bias: Float[np.ndarray, "experts"],
    top_k: int,
    scaling: float,
    normalise: bool = True,
) -> tuple[Int[np.ndarray, "q k"], Float64[np.ndarray, "q k"]]:
    """Experts and weights (DeepSeek-V3 eq. 13 to 16).

    The bias (`e_score_correction_bias`) takes part in the choice only. Lowest expert index first among equal scores.
    """
    affinity = sigmoid(router_logits.astype(np.float64))
    experts = np.argsort(-(affinity + bias), axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(affinity, experts, -1)
    if normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return experts, weights * scaling


def moe(
    p: Params, config: ModelConfig, x: Float64[np.ndarray, "q hidden"]
) -> tuple[Float64[np.ndarray, "q hidden"], Routing]:
    """Routed experts plus the shared one (DeepSeek-V3 eq. 12, without the residual)."""
    router_logits = linear(p["gate"], x)
    experts, weights = route(
        router_logits,
        p["gate"]["e_score_correction_bias"],
        config.num_experts_per_tok,
        config.routed_scaling_factor,
        config.norm_topk_prob,
    )
    out = swiglu(p["shared_experts"], x) if config.n_shared_experts else np.zeros_like(x)
    for expert in np.unique(experts):
        token, choice = np.nonzero(experts == expert)
        one = {name: {"weight": matrix["weight"][expert]} for name, matrix in p["experts"].items()}
        out[token] += weights[token, choice, None] * swiglu(one, x[token])
    return out, Routing(router_logits, experts, weights)


def rms_norm(
    x: Float64[np.ndarray, "*lead dim"], weight: Float64[np.ndarray, "dim"], eps: float
) -> Float64[np.ndarray, "*lead dim"]:
    """x / sqrt(mean(x^2) + eps) * weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def linear(p: Params, x: Float64[np.ndarray, "*lead in"]) -> Float64[np.ndarray, "*lead out"]:
    """x @ weight^T, weight [out, in]."""
    return x @ p["weight"].T


def swiglu(p: Params, x: Float64[np.ndarray, "q hidden"]) -> Float64[np.ndarray, "q hidden"]:
    """down(silu(gate x) * up x), the MLP of a dense layer and of every expert (config key `hidden_act` "silu")."""
    gate = linear(p["gate_proj"], x)
    return linear(p["down_proj"], gate * sigmoid(gate) * linear(p["up_proj"], x))


def sigmoid(x: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """1 / (1 + exp(-x))."""
    small = np.exp(-np.abs(x))  # never overflows, and keeps full relative precision for very negative x
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def softmax(x: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Over the last dimension; -inf gets weight 0."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
