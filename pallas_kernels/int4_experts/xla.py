"""Plain-JAX experts.

One token or so takes its experts one by one: only the weights it needs are read, and the slice of a matrix fuses into
its matrix-vector product. More tokens are grouped by expert. Few small experts held in the fused form are all taken in
two matmuls, by one token too where it needs more than half of them: that wastes experts / top_k of the arithmetic, but
each of many small matmuls would cost more, and nearly every expert is in use anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.int4 import dequantize
from pallas_kernels.int4_experts.layout import PackedExperts
from pallas_kernels.numerics import matmul_nt, precision, weight_first

ONE_BY_ONE = 16  # assignments; the loop is unrolled, so this also bounds the size of the program

Matrices = Callable[[Int32[Array, ""]], tuple[Array, ...]]


def dense_experts(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate: Float[Array, "experts inner hidden"],
    up: Float[Array, "experts inner hidden"],
    down: Float[Array, "experts hidden inner"],
) -> Float[Array, "tokens hidden"]:
    def matrices(e: Int32[Array, ""]) -> tuple[Array, Array, Array]:
        gate_e, up_e, down_e = (lax.dynamic_index_in_dim(w, e, keepdims=False) for w in (gate, up, down))
        return gate_e, up_e, down_e

    if indices.size <= ONE_BY_ONE:
        return _one_by_one(x, indices, weights, matrices)
    return _grouped(x, indices, weights, gate.shape[0], matrices)


def fused_experts(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_up: Float[Array, "experts gate_and_up hidden"],
    down: Float[Array, "experts hidden inner"],
    all_down: Float[Array, "hidden all_inner"],
) -> Float[Array, "tokens hidden"]:
    most = 2 * indices.shape[1] > gate_up.shape[0]
    if most or indices.size > ONE_BY_ONE:
        return _whole(x, indices, weights, gate_up, all_down)

    def matrices(e: Int32[Array, ""]) -> tuple[Array, Array]:
        gate_up_e, down_e = (lax.dynamic_index_in_dim(w, e, keepdims=False) for w in (gate_up, down))
        return gate_up_e, down_e

    return _one_by_one(x, indices, weights, matrices)


def int4_experts(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    experts: PackedExperts,
) -> Float[Array, "tokens hidden"]:
    def matrices(e: Int32[Array, ""]) -> tuple[Array, Array, Array]:
        def matrix(packed: Array, scale: Array, columns: int) -> Array:
            one = [lax.dynamic_index_in_dim(a, e, keepdims=False) for a in (packed, scale)]
            return dequantize(*one, columns=columns, group_size=experts.group_size, dtype=x.dtype)

        return (
            matrix(experts.gate_packed, experts.gate_scale, experts.hidden),
            matrix(experts.up_packed, experts.up_scale, experts.hidden),
            matrix(experts.down_packed, experts.down_scale, experts.inner),
        )

    indices, weights = _only_ours(indices, weights, experts.experts)
    if indices.size <= ONE_BY_ONE:
        return _one_by_one(x, indices, weights, matrices)
    return _grouped(x, indices, weights, experts.experts, matrices)


def _only_ours(
    indices: Int32[Array, "tokens top_k"], weights: Float[Array, "tokens top_k"], experts: int
) -> tuple[Int32[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
    """Assignments to experts that are not here become ones of weight 0."""
    ours = (indices >= 0) & (indices < experts)
    return jnp.where(ours, indices, 0), jnp.where(ours, weights, 0)


def _one_by_one(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    matrices: Matrices,
) -> Float[Array, "tokens hidden"]:
    rows = []
    for t in range(indices.shape[0]):
        outs = [_swiglu_one(x[t : t + 1], *matrices(indices[t, k])) for k in range(indices.shape[1])]
        rows.append(sum(out.astype(jnp.float32) * weights[t, k].astype(jnp.float32) for k, out in enumerate(outs)))
    return jnp.concatenate(rows).astype(x.dtype)


def _swiglu_one(x: Float[Array, "1 hidden"], *matrices: Float[Array, "_ _"]) -> Float[Array, "1 hidden"]:
    """`swiglu` of one row by gate, up and down, or by gate stacked on up and down.

    Written so that XLA's CPU backend fuses the slicing of a matrix into its product with `x`: it does so for an
    explicitly transposed operand only, else it copies the matrix first. The barriers keep it from fusing what comes
    before into the same loop (computed once per output) and what comes after (the copy again).
    """
    p, barrier = precision(x.dtype), lax.optimization_barrier
    x, down = barrier(x), matrices[-1]
    products = barrier([jnp.matmul(x, w.T, precision=p) for w in matrices[:-1]])
    g, u = products if len(products) == 2 else jnp.split(products[0], 2, axis=1)
    inner = barrier(jax.nn.silu(g) * u)
    return barrier(jnp.matmul(inner, down.T, precision=p))


def _whole(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_up: Float[Array, "experts gate_and_up hidden"],
    all_down: Float[Array, "hidden all_inner"],
) -> Float[Array, "tokens hidden"]:
    """The routing weights scale the inner activations, so that `down` sums over experts in the same matmul.

    Tokens stay the last axis between the products, as the first leaves them: nothing is transposed.
    """
    tokens, hidden = x.shape
    experts = gate_up.shape[0]
    one_hot = indices[None, :, :] == jnp.arange(experts, dtype=jnp.int32)[:, None, None]
    routed = jnp.sum(jnp.where(one_hot, weights[None, :, :].astype(jnp.float32), 0.0), axis=2)
    both = weight_first(gate_up.reshape(-1, hidden), x, 1).reshape(experts, -1, tokens)
    g, u = jnp.split(both, 2, axis=1)
    a = (jax.nn.silu(g) * u).astype(jnp.float32) * routed[:, None, :]
    return weight_first(all_down, a.reshape(-1, tokens).astype(x.dtype), 0).T


def _grouped(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    n_experts: int,
    matrices: Matrices,
) -> Float[Array, "tokens hidden"]:
    """One trip per (expert, block of its assignments): each used expert's weights are read once per block."""
    tokens, top_k = indices.shape
    n = tokens * top_k
    block = min(64, tokens)
    expert = indices.reshape(n)
    order = jnp.argsort(expert, stable=True)
    counts = jnp.zeros(n_experts, jnp.int32).at[expert].add(1)
    ends = jnp.cumsum(counts)
    blocks = -(-counts // block)
    block_ends = jnp.cumsum(blocks)
    flat_weights = weights.reshape(n).astype(jnp.float32)

    def body(i, y):
        e = jnp.searchsorted(block_ends, i, side="right").astype(jnp.int32)
        first = ends[e] - counts[e] + (i - (block_ends[e] - blocks[e])) * block
        rank = first + jnp.arange(block, dtype=jnp.int32)
        assignment = order[jnp.minimum(rank, n - 1)]
        token = assignment // top_k
        out = swiglu(x[token], *matrices(e)).astype(jnp.float32)
        weight = jnp.where(rank < ends[e], flat_weights[assignment], 0.0)
        return y.at[token].add(out * weight[:, None])

    y = lax.fori_loop(0, block_ends[-1], body, jnp.zeros((tokens, x.shape[1]), jnp.float32))
    return y.astype(x.dtype)


def swiglu(
    x: Float[Array, "tokens hidden"],
    gate: Float[Array, "inner hidden"],
    up: Float[Array, "inner hidden"],
    down: Float[Array, "hidden inner"],
) -> Float[Array, "tokens hidden"]:
    return matmul_nt(jax.nn.silu(matmul_nt(x, gate)) * matmul_nt(x, up), down)
