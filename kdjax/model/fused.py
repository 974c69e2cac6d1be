"""The fused layout: the same model with fewer, larger matmuls, for small models in float32 on CPU.

There a matmul of a few rows costs tens of microseconds before it computes anything. So, once, at load: matrices that
read the same input are put side by side; W_UK is multiplied into q_b_proj and W_UV into o_proj, which pays while
kv_lora_rank is about as small as a head; shared experts join the routed ones with weight 1. Down of the experts is held
twice: expert by expert, for a token or two that read few of them, and all as one matrix, for a tree or a prompt.

Rounding differs from that of the checkpoint layout by a float32 unit or so per product; cache rows are the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from kdjax.config import ModelConfig
from kdjax.model import cache as kv
from kdjax.model import rope
from kdjax.model.linear import WeightFirstLinear
from kdjax.model.mla import Step
from kdjax.model.norm import RMSNorm
from kdjax.model.router import Router
from kdjax.model.runtime import Runtime
from pallas_kernels.int4_experts import fused_experts
from pallas_kernels.tree_attention import tree_attention

Params = dict[Any, Any]


class FusedMLP(nnx.Module):
    """down(silu(gate x) * up x), gate and up as one matrix."""

    def __init__(self, hidden: int, inner: int, dtype: jnp.dtype):
        self.inner = inner
        self.gate_up_proj = WeightFirstLinear(hidden, 2 * inner, dtype)
        self.down_proj = WeightFirstLinear(inner, hidden, dtype)

    def __call__(self, x: Float[Array, "*lead hidden"]) -> Float[Array, "*lead hidden"]:
        both = self.gate_up_proj(x)
        return self.down_proj(jax.nn.silu(both[..., : self.inner]) * both[..., self.inner :])


class FusedMLA(nnx.Module):
    """Absorbed attention without a separate W_UK or W_UV."""

    def __init__(self, config: ModelConfig, runtime: Runtime):
        c, dtype = config, runtime.dtype
        self.config, self.runtime = config, runtime
        self.qkv_a_proj = WeightFirstLinear(c.hidden_size, c.q_lora_rank + c.latent_dim, dtype)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_norm_eps, dtype)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.latent_norm_eps, dtype)
        self.q_latent_proj = WeightFirstLinear(c.q_lora_rank, c.num_attention_heads * c.latent_dim, dtype)
        self.o_latent_proj = WeightFirstLinear(c.num_attention_heads * c.kv_lora_rank, c.hidden_size, dtype)

    def __call__(
        self, x: Float[Array, "slots q hidden"], norm: RMSNorm, rows: Float[Array, "slots rows width"], step: Step
    ) -> tuple[Float[Array, "slots q hidden"], Float[Array, "slots rows width"]]:
        c = self.config
        down = self.qkv_a_proj(norm(x))
        q = self.q_latent_proj(self.q_a_layernorm(down[..., : c.q_lora_rank]))
        q = q.reshape(*x.shape[:2], c.num_attention_heads, c.latent_dim)
        latent = self.kv_a_layernorm(down[..., c.q_lora_rank : c.q_lora_rank + c.kv_lora_rank])
        k_rope = rope.rotate_interleaved(down[..., c.q_lora_rank + c.kv_lora_rank :], step.cos, step.sin)
        rows = kv.append(rows, jnp.concatenate([latent, k_rope], axis=-1), step.lengths)
        out = tree_attention(
            q[..., : c.kv_lora_rank],
            rope.rotate_interleaved_heads(q[..., c.kv_lora_rank :], step.cos, step.sin),
            rows,
            step.lengths,
            step.ancestors,
            scale=rope.mla_softmax_scale(c.qk_head_dim, c.rope_scaling),
            backend=self.runtime.backend,
            shared=step.plan,
        )
        return self.o_latent_proj(out.reshape(*x.shape[:2], -1)), rows


class FusedExperts(nnx.Module):
    """Weights of `fused_experts`; the shared experts come last."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        n = config.n_routed_experts + config.n_shared_experts
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate_up = nnx.Param(jnp.zeros((n, 2 * inner, hidden), dtype))
        self.down = nnx.Param(jnp.zeros((n, hidden, inner), dtype))
        self.all_down = nnx.Param(jnp.zeros((hidden, n * inner), dtype))


class FusedMoE(nnx.Module):
    """sum_k w_k expert_k(x) + shared(x), the shared experts among the k with weight 1."""

    def __init__(self, config: ModelConfig, runtime: Runtime):
        self.config, self.runtime = config, runtime
        self.gate = Router(config, runtime)
        self.experts = FusedExperts(config, runtime.dtype)

    def __call__(
        self, x: Float[Array, "slots q hidden"], norm: RMSNorm
    ) -> tuple[Float[Array, "slots q hidden"], Int32[Array, "slots q top_k"]]:
        """The result for norm(x), and the routed experts of each token."""
        c, experts = self.config, self.experts
        tokens = norm(x).reshape(-1, x.shape[-1])
        indices, weights = self.gate(tokens)
        shape = (tokens.shape[0], c.n_shared_experts)
        shared = jnp.broadcast_to(c.n_routed_experts + jnp.arange(shape[1], dtype=jnp.int32)[None, :], shape)
        y = fused_experts(
            tokens,
            jnp.concatenate([indices, shared], axis=1),
            jnp.concatenate([weights, jnp.ones(shape, jnp.float32)], axis=1),
            *(w.get_value() for w in (experts.gate_up, experts.down, experts.all_down)),
            backend=self.runtime.backend,
        )
        return y.reshape(x.shape), indices.reshape(*x.shape[:2], -1)


def fuse(params: Params, config: ModelConfig) -> Params:
    """From params in the checkpoint layout, float32 with dense experts. On the host, where nothing is compiled."""
    layers = {
        i: {
            "input_layernorm": layer["input_layernorm"],
            "self_attn": _fuse_mla(layer["self_attn"], config),
            "post_attention_layernorm": layer["post_attention_layernorm"],
            "mlp": _fuse_moe(layer["mlp"], config) if config.is_moe(i) else fuse_mlp(layer["mlp"]),
        }
        for i, layer in params["layers"].items()
    }
    return {**params, "layers": layers}


def side_by_side(*weights: Any) -> Params:
    """[out, in] matrices that read the same input, as one."""
    return {"weight": jnp.asarray(np.concatenate([np.asarray(w) for w in weights]))}


def fuse_mlp(mlp: Params) -> Params:
    """The params of `FusedMLP` from those of an MLP in the checkpoint layout."""
    gate, up, down = (mlp[name]["weight"] for name in ("gate_proj", "up_proj", "down_proj"))
    return {"gate_up_proj": side_by_side(gate, up), "down_proj": side_by_side(down)}


def _fuse_mla(attn: Params, c: ModelConfig) -> Params:
    heads, nope = c.num_attention_heads, c.qk_nope_head_dim

    def wide(name: str) -> np.ndarray:
        return np.asarray(attn[name]["weight"], np.float64)

    q_b = wide("q_b_proj").reshape(heads, c.qk_head_dim, c.q_lora_rank)
    kv_b = wide("kv_b_proj").reshape(heads, nope + c.v_head_dim, c.kv_lora_rank)
    o = wide("o_proj").reshape(c.hidden_size, heads, c.v_head_dim)
    q_latent = np.einsum("hnr,hnq->hrq", kv_b[:, :nope], q_b[:, :nope])
    q = np.concatenate([q_latent, q_b[:, nope:]], axis=1).reshape(-1, c.q_lora_rank)
    o_latent = np.einsum("dhv,hvr->dhr", o, kv_b[:, nope:]).reshape(c.hidden_size, -1)
    return {
        "qkv_a_proj": side_by_side(attn["q_a_proj"]["weight"], attn["kv_a_proj_with_mqa"]["weight"]),
        "q_a_layernorm": attn["q_a_layernorm"],
        "kv_a_layernorm": attn["kv_a_layernorm"],
        "q_latent_proj": side_by_side(q.astype(np.float32)),
        "o_latent_proj": side_by_side(o_latent.astype(np.float32)),
    }


def _fuse_moe(moe: Params, c: ModelConfig) -> Params:
    hidden, inner = c.hidden_size, c.moe_intermediate_size

    def experts(name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Routed and shared experts as one stack [E + shared, out, in]."""
        routed = np.asarray(moe["experts"][name]["weight"])
        if not c.n_shared_experts:
            return routed
        shared = np.asarray(moe["shared_experts"][name]["weight"])
        shared = np.moveaxis(shared.reshape(shape), -2, 0) if name == "down_proj" else shared.reshape(shape)
        return np.concatenate([routed, shared])

    gate, up = (experts(name, (-1, inner, hidden)) for name in ("gate_proj", "up_proj"))
    down = experts("down_proj", (hidden, -1, inner))
    return {
        "gate": moe["gate"],
        "experts": {
            "gate_up": jnp.asarray(np.concatenate([gate, up], axis=1)),
            "down": jnp.asarray(down),
            "all_down": jnp.asarray(np.ascontiguousarray(np.moveaxis(down, 1, 0).reshape(hidden, -1))),
        },
    }
