"""One pre-norm transformer layer."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from kdjax.config import ModelConfig
from kdjax.model import parallel
from kdjax.model.experts import MLP, MoE
from kdjax.model.fused import FusedMLA, FusedMLP, FusedMoE
from kdjax.model.mla import MLA, Step
from kdjax.model.norm import RMSNorm
from kdjax.model.runtime import Runtime


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, layer: int, runtime: Runtime):
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, runtime.dtype)
        fused = runtime.layout == "fused"
        mla, moe, mlp = (FusedMLA, FusedMoE, FusedMLP) if fused else (MLA, MoE, MLP)
        self.self_attn = mla(c, runtime)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, runtime.dtype)
        self.attention_axes = runtime.mesh.model_axes
        self.mlp_axes = runtime.mesh.all_axes if c.is_moe(layer) else runtime.mesh.model_axes
        self.mlp = moe(c, runtime) if c.is_moe(layer) else mlp(c.hidden_size, c.intermediate_size, runtime.dtype)

    def __call__(
        self, x: Float[Array, "slots q hidden"], rows: Float[Array, "slots rows width"], step: Step
    ) -> tuple[Float[Array, "slots q hidden"], Float[Array, "slots rows width"]]:
        """The residual stream after the layer, and the layer's cache rows with those of `x` appended.

        Both halves return this device's part of a sum: two all-reduces per layer, and no other exchange of activations.
        """
        attended, rows = self.self_attn(self.input_layernorm(x), rows, step)
        x = x + parallel.total(attended, self.attention_axes)
        moved = self.mlp(self.post_attention_layernorm(x))
        return x + parallel.total(moved, self.mlp_axes), rows
