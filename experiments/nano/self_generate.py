"""Stage 2: text written by the target itself, which is what the drafter has to predict."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rich.console import Console

from experiments.nano import network
from experiments.nano.config import NanoConfig, SelfDataConfig
from experiments.nano.data import Windows
from kdjax.config.model import ModelConfig
from kdjax.evaluate.loops import looping
from kdjax.model import rope


def generate_rows(
    config: ModelConfig,
    params: Any,
    bias: Float[Array, "moe_layers experts"],
    prompts: Int[Array, "rows prompt"],
    temperature: Float[Array, " rows"],
    key: Array,
    seq_len: int,
) -> Int[Array, "rows seq"]:
    """Continues every prompt to `seq_len` tokens; temperature 0 is greedy. One token a step for all rows."""
    rows, prompt_len = prompts.shape
    h, nope = config.num_attention_heads, config.qk_nope_head_dim
    cache = jnp.zeros((config.num_hidden_layers, rows, seq_len, config.latent_dim), jnp.bfloat16)
    tokens = jnp.zeros((rows, seq_len), jnp.int32).at[:, :prompt_len].set(prompts)
    eps = config.latent_norm_eps

    def attend(p: Any, x: Array, rows_of_layer: Array, t: Array) -> tuple[Array, Array]:
        angles = network.cos_sin(t[None], config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
        q = network.linear(
            p["q_b_proj"], network.rms_norm(network.linear(p["q_a_proj"], x), p["q_a_layernorm"]["weight"], eps)
        ).reshape(rows, 1, h, config.qk_head_dim)
        kv = network.linear(p["kv_a_proj_with_mqa"], x)
        latent = network.rms_norm(kv[..., : config.kv_lora_rank], p["kv_a_layernorm"]["weight"], eps)
        k_pe = network.rotate(rope.rotate_interleaved, kv[:, None, None, config.kv_lora_rank :], angles)[:, 0, 0]
        rows_of_layer = rows_of_layer.at[:, t].set(jnp.concatenate([latent, k_pe], -1))
        kv_b = p["kv_b_proj"]["weight"].reshape(h, nope + config.v_head_dim, config.kv_lora_rank)
        q_latent = jnp.einsum("bhn,hnr->bhr", q[:, 0, :, :nope], kv_b[:, :nope])
        query = jnp.concatenate([q_latent, network.rotate(rope.rotate_interleaved, q[..., nope:], angles)[:, 0]], -1)
        score = jnp.einsum("bhr,btr->bht", query, rows_of_layer, preferred_element_type=jnp.float32)
        score = jnp.where(
            jnp.arange(seq_len) <= t, score * rope.mla_softmax_scale(config.qk_head_dim, config.rope_scaling), -jnp.inf
        )
        weight = jax.nn.softmax(score, -1).astype(x.dtype)
        out = jnp.einsum("bht,btr->bhr", weight, rows_of_layer[..., : config.kv_lora_rank])
        out = jnp.einsum("bhr,hvr->bhv", out, kv_b[:, nope:])
        return network.linear(p["o_proj"], out.reshape(rows, -1)), rows_of_layer

    def step(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        tokens, cache = carry
        x = params["embed_tokens"]["weight"][tokens[:, t]]
        for i in range(config.num_hidden_layers):
            p = params["layers"][i]
            normed = network.rms_norm(x, p["input_layernorm"]["weight"], config.rms_norm_eps)
            out, layer_rows = attend(p["self_attn"], normed, cache[i], t)
            cache = cache.at[i].set(layer_rows)
            x = x + out
            normed = network.rms_norm(x, p["post_attention_layernorm"]["weight"], config.rms_norm_eps)
            if config.is_moe(i):
                layer_bias = bias[i - config.first_k_dense_replace]
                x = x + network.moe(config, p["mlp"], layer_bias, normed[:, None], False)[0][:, 0]
            else:
                x = x + network.swiglu(p["mlp"], normed)
        x = network.rms_norm(x, params["norm"]["weight"], config.rms_norm_eps)
        logits = network.logits(params, x)
        noise = jax.random.gumbel(jax.random.fold_in(key, t), logits.shape) * temperature[:, None]
        chosen = jnp.argmax(logits + noise, -1).astype(jnp.int32)
        keep = jnp.where(t + 1 < prompt_len, tokens[:, jnp.minimum(t + 1, seq_len - 1)], chosen)
        return tokens.at[:, t + 1].set(keep), cache

    return jax.lax.fori_loop(0, seq_len - 1, step, (tokens, cache))[0]


def self_data(
    config: SelfDataConfig, target: ModelConfig, params: Any, bias: Array, data: Windows
) -> dict[str, np.ndarray]:
    """Token arrays `self_greedy` and `self_sampled`, rows of `seq_len` end to end, loops thinned."""
    program = jax.jit(
        lambda params, bias, prompts, temperature, key: generate_rows(
            target, params, bias, prompts, temperature, key, config.seq_len
        )
    )
    rng = np.random.default_rng(config.seed)
    out: dict[str, list[np.ndarray]] = {"self_greedy": [], "self_sampled": []}
    loops = {"self_greedy": [0, 0], "self_sampled": [0, 0]}
    for i in range(max(config.rows // config.batch, 1)):
        key = jax.random.fold_in(jax.random.key(config.seed), i)
        prompts = data.sample(key, config.batch, config.prompt_len)
        temperature = rng.uniform(*config.temperatures, config.batch) * (
            rng.random(config.batch) >= config.greedy_share
        )
        tokens = np.asarray(program(params, bias, prompts, jnp.asarray(temperature, jnp.float32), key))
        loop = looping(tokens)
        keep = ~loop | (rng.random(config.batch) < config.keep_loops)
        for name, mask in (("self_greedy", temperature == 0), ("self_sampled", temperature > 0)):
            out[name].append(tokens[mask & keep].reshape(-1).astype(np.uint16))
            loops[name][0] += int((loop & mask).sum())
            loops[name][1] += int(mask.sum())
    shares = ", ".join(f"{n} {looped / max(rows, 1):.1%} of {rows}" for n, (looped, rows) in loops.items())
    Console().print(f"looping rows: {shares}")
    return {name: np.concatenate(parts) for name, parts in out.items()}


def run(config: NanoConfig, folder: pathlib.Path, params: Any, bias: Array, data: Windows) -> dict[str, np.ndarray]:
    """`self_data`, kept in `folder/self_data.npz` for a continued run."""
    file = folder / "self_data.npz"
    if file.exists():
        return dict(np.load(file))
    tokens: dict[str, Any] = self_data(config.self_data, config.target, params, bias, data)
    np.savez(file, **tokens)
    return tokens
