"""Multi-head latent attention (DeepSeek-V2 section 2.1), absorbed for decoding, materialised as a check."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kdjax.config import ModelConfig
from kdjax.model import cache as kv
from kdjax.model import rope, sequence
from kdjax.model.linear import Linear
from kdjax.model.norm import RMSNorm
from kdjax.model.runtime import Runtime
from pallas_kernels.mla_projections import absorb_queries, compress, expand_values
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.split import split_matmul_nt
from pallas_kernels.tree_attention import Plan, tree_attention
from pallas_kernels.tree_attention.reference import visibility

PREFILL_TOKENS = 256
"""Tokens of a chain from which on materialised keys and values are less work than absorbed attention."""


class Step(NamedTuple):
    """What every layer of one forward shares."""

    cos: Float[Array, "slots q half"]
    sin: Float[Array, "slots q half"]
    lengths: Int32[Array, "slots"]
    """Committed rows; the new ones follow."""
    own_lengths: Int32[Array, "slots"]
    """Those of them that this device holds; all, unless the cache is dealt out over a mesh."""
    ancestors: Bool[Array, "slots q q"] | None
    """Which of the new rows that this device holds each token sees."""
    plan: Plan | None


class MLA(nnx.Module):
    """Multi-head latent attention of one layer. A cache row is the normed latent, then the rotated shared key."""

    def __init__(self, config: ModelConfig, runtime: Runtime):
        c, dtype = config, runtime.dtype
        self.config, self.runtime = config, runtime
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank, dtype)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_norm_eps, dtype)
        self.q_b_proj = Linear(c.q_lora_rank, c.num_attention_heads * c.qk_head_dim, dtype)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.latent_dim, dtype)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.latent_norm_eps, dtype)
        self.kv_b_proj = Linear(c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), dtype)
        self.o_proj = Linear(c.num_attention_heads * c.v_head_dim, c.hidden_size, dtype)

    def __call__(
        self, x: Float[Array, "slots q hidden"], norm: RMSNorm, rows: Float[Array, "slots rows width"], step: Step
    ) -> tuple[Float[Array, "slots q hidden"], Float[Array, "slots rows width"]]:
        """Attention output for norm(x), and the layer's cache rows with those of its tokens appended at `step.lengths`.

        On a mesh the output is the part of this device's heads.
        """
        c = self.config
        prefills = step.ancestors is None and x.shape[1] >= PREFILL_TOKENS
        if self.runtime.backend != "xla" and self.runtime.mla == "absorbed" and not prefills:
            return self.by_kernels(x, norm, rows, step)
        x = norm(x)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(*x.shape[:2], -1, c.qk_head_dim)
        q_nope, q_rope = q[..., : c.qk_nope_head_dim], q[..., c.qk_nope_head_dim :]
        q_rope = rope.rotate_interleaved_heads(q_rope, step.cos, step.sin)

        compressed = self.kv_a_proj_with_mqa(x)
        latent = self.kv_a_layernorm(compressed[..., : c.kv_lora_rank])
        k_rope = rope.rotate_interleaved(compressed[..., c.kv_lora_rank :], step.cos, step.sin)
        rows = kv.append(rows, jnp.concatenate([latent, k_rope], axis=-1), step.lengths, self.runtime.mesh.cache_axes)

        if self.runtime.mla == "materialised":
            attend = self.materialised
        elif self.runtime.backend != "xla" and prefills:
            attend = self.prefill
        else:
            attend = self.absorbed
        out = attend(q_nope, q_rope, rows, step)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), rows

    def up_projections(self) -> Float[Array, "heads nope_and_v rank"]:
        """kv_b_proj per head: W_UK, then W_UV."""
        c = self.config
        return self.kv_b_proj.weight.get_value().reshape(-1, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)

    def by_kernels(
        self, x: Float[Array, "slots q hidden"], norm: RMSNorm, rows: Float[Array, "slots rows width"], step: Step
    ) -> tuple[Float[Array, "slots q hidden"], Float[Array, "slots rows width"]]:
        """`__call__`, absorbed, in as few kernels as can be: each costs about as long as what it computes.

        The first product does not wait for the norm, which the kernel after it makes.
        """
        c, backend, cache_axes = self.config, self.runtime.backend, self.runtime.mesh.cache_axes
        lead, tokens, w = x.shape[:2], x.reshape(-1, x.shape[-1]), self.up_projections()
        cos, sin = (a.reshape(tokens.shape[0], -1) for a in (step.cos, step.sin))
        q_weight, kv_weight = self.q_a_layernorm.weight.get_value(), self.kv_a_layernorm.weight.get_value()
        matrices = [m.weight.get_value() for m in (self.q_a_proj, self.kv_a_proj_with_mqa)]
        down = split_matmul_nt(tokens, *matrices, column_scale=norm.weight.get_value())
        row = kv.appended(step.lengths, lead[1], rows.shape[1], cache_axes).reshape(-1)
        eps: Any = dict(x_eps=norm.eps, eps=c.latent_norm_eps)
        q, rows = compress(down, tokens, q_weight, kv_weight, cos, sin, rows, row, **eps, backend=backend)
        queries = absorb_queries(split_matmul_nt(q, self.q_b_proj.weight.get_value()), w, cos, sin, backend=backend)
        q_latent, q_rope = (a.reshape(*lead, *a.shape[1:]) for a in queries)
        o_latent = self.attend_latent(q_latent, q_rope, rows, step).reshape(-1, *q_latent.shape[2:])
        out = expand_values(o_latent, w, c.v_head_dim, backend=backend)
        return self.o_proj(out.reshape(*lead, -1)), rows

    def attend_latent(
        self,
        q_latent: Float[Array, "slots q heads rank"],
        q_rope: Float[Array, "slots q heads rope"],
        rows: Float[Array, "slots rows width"],
        step: Step,
    ) -> Float[Array, "slots q heads rank"]:
        """The attention op, over all devices that share the cache."""
        cache_axes = self.runtime.mesh.cache_axes
        attend = functools.partial(sequence.attend, axes=cache_axes) if cache_axes else tree_attention
        return attend(
            q_latent,
            q_rope,
            rows,
            step.own_lengths,
            step.ancestors,
            scale=rope.mla_softmax_scale(self.config.qk_head_dim, self.config.rope_scaling),
            backend=self.runtime.backend,
            shared=step.plan,
        )

    def absorbed(
        self,
        q_nope: Float[Array, "slots q heads nope"],
        q_rope: Float[Array, "slots q heads rope"],
        rows: Float[Array, "slots rows width"],
        step: Step,
    ) -> Float[Array, "slots q heads v"]:
        """W_UK moves to the query and W_UV behind the softmax: no per-head key or value of the prefix exists.

        Both products use the whole of kv_b_proj (zeros against W_UV, the W_UK part of the result cut off): slicing the
        weight would copy it in every forward, which costs more than the extra arithmetic.
        """
        w = self.up_projections()
        nope = self.config.qk_nope_head_dim

        def per_head(x: Array, w: Array, contracted: int) -> Array:
            """Not einsum: it swaps the operands, for which XLA's CPU backend has no fast matmul."""
            dims = (((3,), (contracted,)), ((2,), (0,)))
            return jnp.moveaxis(lax.dot_general(x, w, dims, precision=self.runtime.precision), 0, 2)

        q_padded = jnp.pad(q_nope, ((0, 0), (0, 0), (0, 0), (0, self.config.v_head_dim)))
        o_latent = self.attend_latent(per_head(q_padded, w, 1), q_rope, rows, step)
        return per_head(o_latent, w, 2)[..., nope:]

    def prefill(
        self,
        q_nope: Float[Array, "slots q heads nope"],
        q_rope: Float[Array, "slots q heads rope"],
        rows: Float[Array, "slots rows width"],
        step: Step,
    ) -> Float[Array, "slots q heads v"]:
        """A prompt's chunk: keys and values of every head for one segment of the prefix at a time."""
        return prefill_attention(
            q_nope,
            q_rope,
            rows,
            step.lengths,
            self.up_projections(),
            scale=rope.mla_softmax_scale(self.config.qk_head_dim, self.config.rope_scaling),
            backend=self.runtime.backend,
        )

    def materialised(
        self,
        q_nope: Float[Array, "slots q heads nope"],
        q_rope: Float[Array, "slots q heads rope"],
        rows: Float[Array, "slots rows width"],
        step: Step,
    ) -> Float[Array, "slots q heads v"]:
        """Keys and values of every head, expanded for the whole cache; one masked softmax in float32."""
        w = self.up_projections()
        w_uk, w_uv = w[:, : self.config.qk_nope_head_dim], w[:, self.config.qk_nope_head_dim :]
        p, rank, q = self.runtime.precision, self.config.kv_lora_rank, q_nope.shape[1]
        latent, k_rope = rows[..., :rank].astype(q_nope.dtype), rows[..., rank:].astype(q_nope.dtype)
        k_nope = jnp.einsum("scr,hnr->shcn", latent, w_uk, precision=p)
        value = jnp.einsum("scr,hvr->shcv", latent, w_uv, precision=p)
        scores = jnp.einsum("sqhn,shcn->sqhc", q_nope, k_nope, precision=p, preferred_element_type=jnp.float32)
        scores += jnp.einsum("sqhp,scp->sqhc", q_rope, k_rope, precision=p, preferred_element_type=jnp.float32)
        scores *= rope.mla_softmax_scale(self.config.qk_head_dim, self.config.rope_scaling)
        ancestors = step.ancestors
        if ancestors is None:
            ancestors = jnp.broadcast_to(jnp.tril(jnp.ones((q, q), bool)), (rows.shape[0], q, q))
        seen = visibility(step.lengths, ancestors, rows.shape[1])[:, :, None, :]
        scores = jnp.where(seen, scores, -jnp.inf)
        weight = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        weight /= jnp.sum(weight, axis=-1, keepdims=True)
        return jnp.einsum("sqhc,shcv->sqhv", weight.astype(value.dtype), value, precision=p)
