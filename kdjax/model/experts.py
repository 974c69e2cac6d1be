"""Feed-forward parts: the dense SwiGLU MLP and the mixture of routed experts with a shared one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from kdjax.config import ModelConfig
from kdjax.errors import KdjaxError
from kdjax.model import parallel
from kdjax.model.int4 import Int4, dequantize
from kdjax.model.linear import Linear
from kdjax.model.norm import RMSNorm
from kdjax.model.router import Router
from kdjax.model.runtime import Runtime
from pallas_kernels.int4_experts import (
    KERNEL_BACKENDS,
    PackedExperts,
    TiledExperts,
    dense_experts,
    int4_experts,
    tile_experts,
)
from pallas_kernels.split import split_matmul_nt


class MLP(nnx.Module):
    """down(silu(gate x) * up x); on a mesh the part of this device's widths."""

    def __init__(self, hidden: int, inner: int, dtype: jnp.dtype):
        self.gate_proj = Linear(hidden, inner, dtype)
        self.up_proj = Linear(hidden, inner, dtype)
        self.down_proj = Linear(inner, hidden, dtype)

    def __call__(self, x: Float[Array, "*lead hidden"]) -> Float[Array, "*lead hidden"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class ExpertMatrix(nnx.Module):
    """One projection, all routed experts: [experts, out, in]. INT4 where the checkpoint has it and it stays packed."""

    def __init__(self, config: ModelConfig, out: int, width: int, runtime: Runtime):
        n, int4 = config.n_routed_experts, config.experts_int4
        if int4 is None or runtime.expert_weights == "dequantized":
            self.weight = nnx.Param(jnp.zeros((n, out, width), runtime.dtype))
        else:
            packed = jnp.zeros((n, out, -(-width // 8)), jnp.uint32)
            scale = jnp.zeros((n, out, -(-width // int4.group_size)), jnp.bfloat16)
            self.weight = nnx.Param(Int4(packed, scale, width, int4.group_size))


def place_experts(weight: Int4, runtime: Runtime) -> Int4 | Float[Array, "_ _ _"]:
    """What a loader puts into the params for one stacked INT4 projection, as `runtime.expert_weights` says."""
    return weight if runtime.expert_weights == "packed" else dequantize(weight, runtime.dtype)


def runs_tiled(config: ModelConfig, runtime: Runtime) -> bool:
    """Whether the experts are held in the layout of the INT4 kernels.

    Raises:
        KdjaxError: they would be, and the activations have a dtype that the kernels do not take.
    """
    if config.experts_int4 is None or runtime.expert_weights != "packed" or runtime.backend not in KERNEL_BACKENDS:
        return False
    if runtime.compute_dtype != "bfloat16":
        raise KdjaxError(
            f"backend={runtime.backend!r} multiplies INT4 experts by bfloat16, not compute_dtype="
            f"{runtime.compute_dtype!r}: choose bfloat16, expert_weights='dequantized' or backend='xla'"
        )
    return True


def tile(gate: Int4, up: Int4, down: Int4) -> TiledExperts:
    """The three projections of a layer's experts as the kernels read them. Done once, at load."""
    return tile_experts(_packed(gate, up, down))


@functools.lru_cache(maxsize=8)
def _tile_on(mesh: Mesh, experts: Any, inner: Any) -> Callable[[Int4, Int4, Int4], TiledExperts]:
    """`tile` on a mesh that splits the experts over axes `experts` and their width over axes `inner`."""
    rows, columns = PartitionSpec(experts, inner), PartitionSpec(experts, None, inner)
    return jax.jit(
        jax.shard_map(
            tile,
            mesh=mesh,
            in_specs=(rows, rows, columns),
            out_specs=TiledExperts(rows, rows, columns, columns),
            check_vma=False,
        )
    )


def tile_where_they_lie(gate: Int4, up: Int4, down: Int4) -> TiledExperts:
    """`tile`, every device its own part where the stacks are split over a mesh."""
    sharding = gate.packed.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return tile(gate, up, down)
    experts, inner, *_ = (*sharding.spec, None, None)
    return _tile_on(sharding.mesh, experts, inner)(gate, up, down)


def tile_layer(layer: dict[str, Any]) -> None:
    """The stacks of INT4 experts of one layer's params put through `tile_where_they_lie`, unless they have been.

    In place: the stacks of all layers do not fit beside their tiles.
    """
    if "gate_proj" in layer["mlp"].get("experts", ()):
        stacks = layer["mlp"].pop("experts")
        gate, up, down = (stacks.pop(name)["weight"] for name in ("gate_proj", "up_proj", "down_proj"))
        layer["mlp"]["experts"] = {"tiles": tile_where_they_lie(gate, up, down)}


def _packed(gate: Int4, up: Int4, down: Int4) -> PackedExperts:
    if len({m.group_size for m in (gate, up, down)}) != 1:
        raise KdjaxError(
            f"gate_proj, up_proj and down_proj of the experts have group sizes {gate.group_size}, {up.group_size} and "
            f"{down.group_size}: quantise all with one"
        )
    return PackedExperts(
        gate.packed, gate.scale, up.packed, up.scale, down.packed, down.scale, group_size=gate.group_size
    )


class TiledStack(nnx.Module):
    """All routed experts, in the layout of the INT4 kernels."""

    def __init__(self, config: ModelConfig, runtime: Runtime):
        self.runtime = runtime
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        shapes = (inner, hidden), (inner, hidden), (hidden, inner)
        stacks: list[Any] = [ExpertMatrix(config, *shape, runtime).weight.get_value() for shape in shapes]
        self.tiles = nnx.Param(tile(*stacks))

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        indices: Int32[Array, "tokens top_k"],
        weights: Float32[Array, "tokens top_k"],
    ) -> Float[Array, "tokens hidden"]:
        return int4_experts(x, indices, weights, self.tiles.get_value(), backend=self.runtime.backend)


class Experts(nnx.Module):
    """All routed experts, in the layout of the checkpoint: packed INT4 or dense.

    Raises:
        KdjaxError: when called, where some projections are INT4 and others are not.
    """

    def __init__(self, config: ModelConfig, runtime: Runtime):
        self.runtime = runtime
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate_proj = ExpertMatrix(config, inner, hidden, runtime)
        self.up_proj = ExpertMatrix(config, inner, hidden, runtime)
        self.down_proj = ExpertMatrix(config, hidden, inner, runtime)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        indices: Int32[Array, "tokens top_k"],
        weights: Float32[Array, "tokens top_k"],
    ) -> Float[Array, "tokens hidden"]:
        matrices = [m.weight.get_value() for m in (self.gate_proj, self.up_proj, self.down_proj)]
        packed = [m for m in matrices if isinstance(m, Int4)]
        if len(packed) == 3:
            return int4_experts(x, indices, weights, _packed(*packed), backend=self.runtime.backend)
        if packed:
            raise KdjaxError("gate_proj, up_proj and down_proj of the experts differ in format: quantise all or none")
        gate, up, down = (m for m in matrices if not isinstance(m, Int4))
        return dense_experts(x, indices, weights, gate, up, down, backend=self.runtime.backend)


class MoE(nnx.Module):
    """sum_k w_k expert_k(x) + shared(x); on a mesh the part of this device's experts and widths."""

    def __init__(self, config: ModelConfig, runtime: Runtime):
        self.mesh, self.n_routed_experts = runtime.mesh, config.n_routed_experts
        self.gate = Router(config, runtime)
        self.experts = (TiledStack if runs_tiled(config, runtime) else Experts)(config, runtime)
        inner = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = MLP(config.hidden_size, inner, runtime.dtype) if inner else None

    def __call__(
        self, x: Float[Array, "slots q hidden"], norm: RMSNorm
    ) -> tuple[Float[Array, "slots q hidden"], Int32[Array, "slots q top_k"]]:
        """The result for norm(x), and the routed experts of each token."""
        tokens = x.reshape(-1, x.shape[-1])
        if self.shared_experts is None:
            y, indices = self.routed(norm(tokens))
        elif self.gate.backend == "xla":
            tokens = norm(tokens)
            y, indices = self.routed(tokens)
            y = y + self._once(self.shared_experts(tokens))
        else:
            y, indices = self.in_few_kernels(tokens, norm, self.shared_experts)
        return y.reshape(x.shape), indices.reshape(*x.shape[:2], -1)

    def routed(
        self, tokens: Float[Array, "tokens hidden"]
    ) -> tuple[Float[Array, "tokens hidden"], Int32[Array, "tokens top_k"]]:
        """The part of the routed experts, and which those are."""
        indices, weights = self.gate(tokens)
        return self.experts(tokens, *self._own(indices, weights)), indices

    def in_few_kernels(
        self, tokens: Float[Array, "tokens hidden"], norm: RMSNorm, shared: MLP
    ) -> tuple[Float[Array, "tokens hidden"], Int32[Array, "tokens top_k"]]:
        """Router, gate and up of the shared experts are one product: alone, each is too small to keep a GPU reading.

        It does not wait for the norm, which the kernel after it makes.
        """
        matrices = [m.weight.get_value() for m in (self.gate, shared.gate_proj, shared.up_proj)]
        scale = norm.weight.get_value()
        parts = split_matmul_nt(tokens, *matrices, column_scale=scale)
        indices, weights, activated, normed = self.gate.choose_and_activate(parts, tokens, norm)
        y = self.experts(normed, *self._own(indices, weights))
        return y + self._once(shared.down_proj(activated)), indices

    def _own(
        self, indices: Int32[Array, "tokens top_k"], weights: Float32[Array, "tokens top_k"]
    ) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
        """Numbers among this device's experts; one past them, with weight 0, stands for those of other devices."""
        if not self.mesh.expert_axes:
            return indices, weights
        here = self.n_routed_experts // self.mesh.expert
        local = indices - here * parallel.index(self.mesh.expert_axes)
        own = (local >= 0) & (local < here)
        return jnp.where(own, local, here), jnp.where(own, weights, 0.0)

    def _once(self, shared: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """Zero on all but one of the devices that hold the same part: the sum over the mesh must have it once."""
        if self.mesh.model_axes == self.mesh.all_axes:
            return shared
        return jnp.where(parallel.index(self.mesh.expert_axes) == 0, shared, jnp.zeros_like(shared))
