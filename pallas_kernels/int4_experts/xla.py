"""Plain-JAX experts: tokens sorted by expert, one blocked loop over the experts that are used."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int32, UInt32

from pallas_kernels.int4 import dequantize
from pallas_kernels.numerics import precision

Packed = tuple[UInt32[Array, "_ _ _"], BFloat16[Array, "_ _ _"]]


def dense_experts(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate: Float[Array, "experts inner hidden"],
    up: Float[Array, "experts inner hidden"],
    down: Float[Array, "experts hidden inner"],
) -> Float[Array, "tokens hidden"]:
    return _grouped(x, indices, weights, gate.shape[0], lambda e: (gate[e], up[e], down[e]))


def int4_experts(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate: Packed,
    up: Packed,
    down: Packed,
    group_size: int,
) -> Float[Array, "tokens hidden"]:
    def matrices(e: Int32[Array, ""]) -> tuple[Array, Array, Array]:
        def matrix(packed: Array, scale: Array, columns: int) -> Array:
            return dequantize(packed[e], scale[e], columns=columns, group_size=group_size, dtype=x.dtype)

        return matrix(*gate, x.shape[1]), matrix(*up, x.shape[1]), matrix(*down, gate[0].shape[1])

    return _grouped(x, indices, weights, gate[0].shape[0], matrices)


def _grouped(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    n_experts: int,
    matrices: Callable[[Int32[Array, ""]], tuple[Array, Array, Array]],
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
        live = rank < ends[e]
        assignment = order[jnp.minimum(rank, n - 1)]
        token = assignment // top_k
        out = swiglu(x[token], *matrices(e)).astype(jnp.float32)
        weight = jnp.where(live, flat_weights[assignment], 0.0)
        return y.at[token].add(out * weight[:, None])

    y = lax.fori_loop(0, block_ends[-1], body, jnp.zeros((tokens, x.shape[1]), jnp.float32))
    return y.astype(x.dtype)


def swiglu(
    x: Float[Array, "tokens hidden"],
    gate: Float[Array, "inner hidden"],
    up: Float[Array, "inner hidden"],
    down: Float[Array, "hidden inner"],
) -> Float[Array, "tokens hidden"]:
    p = precision(x.dtype)
    g = jnp.einsum("td,id->ti", x, gate, precision=p)
    u = jnp.einsum("td,id->ti", x, up, precision=p)
    return jnp.einsum("ti,di->td", jax.nn.silu(g) * u, down, precision=p)
