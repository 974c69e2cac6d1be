"""Routed SwiGLU experts: INT4 (compressed-tensors `pack-quantized`) or dense weights, tokens grouped by expert.

y[t] = sum_k weights[t, k] * down[e] (silu(gate[e] x[t]) * (up[e] x[t])),  e = indices[t, k]
"""

from __future__ import annotations

from jaxtyping import Array, BFloat16, Float, Int32, UInt32

from pallas_kernels.int4_experts import xla
from pallas_kernels.int4_experts.reference import reference as reference

BACKENDS = ("xla",)


def int4_experts(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_packed: UInt32[Array, "experts inner hidden_words"],
    gate_scale: BFloat16[Array, "experts inner hidden_groups"],
    up_packed: UInt32[Array, "experts inner hidden_words"],
    up_scale: BFloat16[Array, "experts inner hidden_groups"],
    down_packed: UInt32[Array, "experts hidden inner_words"],
    down_scale: BFloat16[Array, "experts hidden inner_groups"],
    *,
    group_size: int,
    backend: str,
) -> Float[Array, "tokens hidden"]:
    """The weighted sum of each token's experts, float32 accumulation over k, result in the dtype of `x`.

    `indices` lie in [0, experts); `weights` are float32 and used as given (normalised and scaled by the caller).

    Raises:
        NotImplementedError: a backend, or a width that is not a whole number of scale groups, that is not supported.
    """
    _check_backend("int4_experts", backend)
    hidden, inner = x.shape[1], gate_packed.shape[1]
    for name, width in (("hidden", hidden), ("inner", inner)):
        if width % group_size or width % 8:
            raise NotImplementedError(f"int4_experts: {name}={width} is not a multiple of 8 and of {group_size=}")
    return xla.int4_experts(
        x, indices, weights, (gate_packed, gate_scale), (up_packed, up_scale), (down_packed, down_scale), group_size
    )


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

    Raises:
        NotImplementedError: a backend, or a weight dtype other than that of `x`, that is not supported.
    """
    _check_backend("dense_experts", backend)
    if {gate.dtype, up.dtype, down.dtype} != {x.dtype}:
        raise NotImplementedError(f"dense_experts: {x.dtype=} with {gate.dtype=}, {up.dtype=}, {down.dtype=}")
    return xla.dense_experts(x, indices, weights, gate, up, down)


def fused_experts(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_up: Float[Array, "experts gate_and_up hidden"],
    all_gate_up: Float[Array, "hidden all_gates_and_ups"],
    down: Float[Array, "experts inner hidden"],
    *,
    backend: str,
) -> Float[Array, "tokens hidden"]:
    """`dense_experts` for few small experts, whose gate and up are held twice.

    `gate_up` has the rows of gate, then those of up; `all_gate_up` has the columns of every expert's gate, then those
    of every expert's up; `down` is transposed, so that all experts together are one [experts * inner, hidden] matrix.

    Raises:
        NotImplementedError: a backend, or a weight dtype other than that of `x`, that is not supported.
    """
    _check_backend("fused_experts", backend)
    if {gate_up.dtype, all_gate_up.dtype, down.dtype} != {x.dtype}:
        raise NotImplementedError(
            f"fused_experts: {x.dtype=} with {gate_up.dtype=}, {all_gate_up.dtype=}, {down.dtype=}"
        )
    return xla.fused_experts(x, indices, weights, gate_up, all_gate_up, down)


def _check_backend(op: str, backend: str) -> None:
    if backend not in BACKENDS:
        raise NotImplementedError(f"{op}: {backend=} is not supported; supported: {', '.join(BACKENDS)}")
