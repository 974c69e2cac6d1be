"""Routed SwiGLU experts: INT4 (compressed-tensors `pack-quantized`) or dense weights, tokens grouped by expert.

y[t] = sum_k weights[t, k] * down[e] (silu(gate[e] x[t]) * (up[e] x[t])),  e = indices[t, k]
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.device import device_kind
from pallas_kernels.int4_experts import triton, xla
from pallas_kernels.int4_experts.config import Config, Rings, Tile, choose, choose_matmul, device_table
from pallas_kernels.int4_experts.layout import PackedExperts as PackedExperts
from pallas_kernels.int4_experts.layout import TiledExperts as TiledExperts
from pallas_kernels.int4_experts.layout import TiledMatrix as TiledMatrix
from pallas_kernels.int4_experts.layout import padded
from pallas_kernels.int4_experts.layout import tile_experts as tile_experts
from pallas_kernels.int4_experts.layout import tile_matrix as tile_matrix
from pallas_kernels.int4_experts.reference import reference as reference

BACKENDS = ("xla", "triton", "mosaic", "interpret")
KERNEL_BACKENDS = ("triton", "interpret")
KERNELS = {"triton": ("mosaic", "triton"), "mosaic": ("mosaic",), "interpret": ("triton",)}
"""That may serve a backend of `int4_experts`."""


def int4_experts(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    experts: PackedExperts | TiledExperts,
    *,
    backend: str,
    config: Config | Rings | None = None,
) -> Float[Array, "tokens hidden"]:
    """The weighted sum of each token's experts, float32 accumulation, result in the dtype of `x`.

    Assignments with an index outside [0, experts) contribute nothing: a shard of the experts passes the indices less
    the number of its first expert. `weights` are float32 and used as given (normalised and scaled by the caller).

    Args:
        x: bfloat16 for the kernels; float32 too for "xla".
        indices: expert of each assignment, those of one token all different.
        weights: routing weight of each assignment.
        experts: for "xla" as in the checkpoint, for the others the result of `tile_experts`.
        backend: "xla", "triton" (NVIDIA GPUs; on Hopper the tuned table decides between the Triton and the Mosaic
            kernel), "mosaic" (Hopper) or "interpret" (the Triton kernels emulated).
        config: how the kernels cut their work, instead of the tuned choice for the device.

    Raises:
        NotImplementedError: a backend, dtype, layout or width that is not supported.
    """
    _check_backend("int4_experts", backend, BACKENDS)
    if backend not in KERNELS:
        if not isinstance(experts, PackedExperts):
            raise NotImplementedError(f"int4_experts: {backend=} takes PackedExperts, not {type(experts).__name__}")
        for name, width in (("hidden", experts.hidden), ("inner", experts.inner)):
            if width % experts.group_size or width % 8:
                raise NotImplementedError(
                    f"int4_experts: {name}={width} is not a multiple of 8 and of group_size={experts.group_size}"
                )
        return xla.int4_experts(x, indices, weights, experts)

    if not isinstance(experts, TiledExperts):
        raise NotImplementedError(f"int4_experts: {backend=} takes the result of tile_experts, not PackedExperts")
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"int4_experts: {backend=} takes bfloat16 activations, not {x.dtype}")
    if padded(x.shape[1]) != experts.hidden:
        raise NotImplementedError(f"int4_experts: hidden={x.shape[1]} with experts tiled for {experts.hidden}")
    if x.shape[0] == 0:
        return jnp.zeros_like(x)
    config = config or choose(device_table(device_kind()), x.shape[0], experts.inner, KERNELS[backend])
    if (kernel := "mosaic" if isinstance(config, Rings) else "triton") not in KERNELS[backend]:
        raise NotImplementedError(f"int4_experts: {backend=} cannot run {config=}, which is for the {kernel} kernel")
    if isinstance(config, Rings):
        from pallas_kernels.int4_experts import mosaic  # its interface moves with JAX: nobody else shall need it

        return mosaic.int4_experts(x, indices, weights, experts, config)
    return triton.int4_experts(x, indices, weights, experts, config, interpret=backend == "interpret")


def int4_matmul(
    x: Float[Array, "tokens columns"], matrix: TiledMatrix, *, backend: str, tile: Tile | None = None
) -> Float[Array, "tokens rows"]:
    """x @ matrix^T for one INT4 matrix (the result of `tile_matrix`), float32 accumulation, bfloat16 in and out.

    Raises:
        NotImplementedError: a backend or dtype that is not supported.
    """
    _check_backend("int4_matmul", backend, KERNEL_BACKENDS)
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"int4_matmul: {backend=} takes bfloat16 activations, not {x.dtype}")
    tile = tile or choose_matmul(device_table(device_kind()), x.shape[0])
    return triton.int4_matmul(x, matrix, tile, interpret=backend == "interpret")


def dense_experts(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate: Float[Array, "experts inner hidden"],
    up: Float[Array, "experts inner hidden"],
    down: Float[Array, "experts hidden inner"],
    *,
    backend: str,
) -> Float[Array, "tokens hidden"]:
    """`int4_experts` for weights that are plain arrays in the dtype of `x` (bf16 checkpoints, or dequantised once).

    Every backend computes them with XLA's matmuls: there is no kernel for them.

    Raises:
        NotImplementedError: a backend, or a weight dtype other than that of `x`, that is not supported.
    """
    _check_backend("dense_experts", backend, BACKENDS)
    if {gate.dtype, up.dtype, down.dtype} != {x.dtype}:
        raise NotImplementedError(f"dense_experts: {x.dtype=} with {gate.dtype=}, {up.dtype=}, {down.dtype=}")
    return xla.dense_experts(x, indices, weights, gate, up, down)


def fused_experts(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_up: Float[Array, "experts gate_and_up hidden"],
    down: Float[Array, "experts hidden inner"],
    all_down: Float[Array, "hidden all_inner"],
    *,
    backend: str,
) -> Float[Array, "tokens hidden"]:
    """`dense_experts` for few small experts, whose down is held twice.

    `gate_up` has the rows of gate, then those of up; `all_down` has the columns of every expert's down in turn.

    Raises:
        NotImplementedError: a backend, or a weight dtype other than that of `x`, that is not supported.
    """
    _check_backend("fused_experts", backend, BACKENDS)
    if {gate_up.dtype, down.dtype, all_down.dtype} != {x.dtype}:
        raise NotImplementedError(f"fused_experts: {x.dtype=} with {gate_up.dtype=}, {down.dtype=}, {all_down.dtype=}")
    return xla.fused_experts(x, indices, weights, gate_up, down, all_down)


def _check_backend(op: str, backend: str, supported: tuple[str, ...]) -> None:
    if backend not in supported:
        raise NotImplementedError(f"{op}: {backend=} is not supported; supported: {', '.join(supported)}")
