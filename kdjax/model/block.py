"""One pre-norm transformer layer."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float, Int32

from kdjax.config import ModelConfig
from kdjax.model import parallel
from kdjax.model.experts import MLP, MoE
from kdjax.model.fused import FusedMLA, FusedMLP, FusedMoE
from kdjax.model.mla import MLA, Step
from kdjax.model.norm import RMSNorm
from kdjax.model.runtime import Runtime


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)): a dense MLP in the first layers, then experts."""

    def __init__(self, config: ModelConfig, layer: int, runtime: Runtime):
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, runtime.dtype)
        fused = runtime.layout == "fused"
        mla, moe, mlp = (FusedMLA, FusedMoE, FusedMLP) if fused else (MLA, MoE, MLP)
        self.self_attn = mla(c, runtime)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, runtime.dtype)
        self.attention_axes = runtime.mesh.model_axes
        self.is_moe = c.is_moe(layer)
        self.mlp_axes = runtime.mesh.all_axes if self.is_moe else runtime.mesh.model_axes
        self.mlp = moe(c, runtime) if self.is_moe else mlp(c.hidden_size, c.intermediate_size, runtime.dtype)

    def __call__(
        self, x: Float[Array, "slots q hidden"], rows: Float[Array, "slots rows width"], step: Step
    ) -> tuple[Float[Array, "slots q hidden"], Float[Array, "slots rows width"], Int32[Array, "slots q top_k"] | None]:
        """The residual stream after the layer, the layer's cache rows with those of `x` appended, and the routed
        experts of each token, None in a dense layer.

        Both halves return this device's part of a sum: two all-reduces per layer, and no other exchange of activations.
        """
        attended, rows = self.self_attn(x, self.input_layernorm, rows, step)
        x = x + parallel.total(attended, self.attention_axes)
        routing = None
        if isinstance(self.mlp, MLP | FusedMLP):
            moved = self.mlp(self.post_attention_layernorm(x))
        else:
            moved, routing = self.mlp(x, self.post_attention_layernorm)
        return x + parallel.total(moved, self.mlp_axes), rows, routing
