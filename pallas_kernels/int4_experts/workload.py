"""Random layers and routings for the benchmark and the tuner."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.int4_experts.layout import BLOCK_COLUMNS, BLOCK_ROWS, PAIRS, PLANE_COLUMNS, TiledExperts

Pattern = Literal["uniform", "skewed"]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_experts(key: jax.Array, experts: int, hidden: int, inner: int) -> TiledExperts:
    """Weights with all codes in use, made in the layout of the kernels; widths are multiples of 128."""

    def matrix(key: jax.Array, rows: int, columns: int, parts: int) -> tuple[jax.Array, jax.Array]:
        blocks = (experts, rows // BLOCK_ROWS, columns // BLOCK_COLUMNS, parts)
        for_words, for_scales = jax.random.split(key)
        words = jax.random.bits(for_words, (*blocks, BLOCK_ROWS, PLANE_COLUMNS), jnp.uint16)
        scales = jax.random.uniform(for_scales, (*blocks, PAIRS, BLOCK_ROWS, 2), minval=0.005, maxval=0.02)
        pairs = lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.int32)
        return lax.bitcast_convert_type(words, jnp.int16), pairs

    first, second = jax.random.split(key)
    return TiledExperts(*matrix(first, inner, hidden, 2), *matrix(second, hidden, inner, 1))


def routing(rng: np.random.Generator, tokens: int, experts: int, top_k: int, pattern: Pattern) -> np.ndarray:
    """int32 [tokens, top_k] different experts per token.

    "skewed" draws them with the popularity of rank r falling like 1 / (r + 10), the ranks dealt out at random: about
    the imbalance of a mixture of experts on text of one kind.
    """
    popularity = np.zeros(experts)
    if pattern == "skewed":
        popularity = -np.log(rng.permutation(experts) + 10.0)
    gumbel = rng.gumbel(size=(tokens, experts))
    return np.argsort(-(popularity[None, :] + gumbel), axis=1)[:, :top_k].astype(np.int32)


def needed_bytes(routings: list[np.ndarray], hidden: int, inner: int) -> float:
    """Of the weights and scales of the experts in use, on average over the routings."""
    used = np.mean([len(np.unique(indices)) for indices in routings])
    return float(used * 3 * hidden * inner * (4 + 16 / PLANE_COLUMNS) / 8)


@functools.partial(jax.jit, static_argnums=1)
def dense_expert(experts: TiledExperts, part: str, expert: jax.Array) -> jax.Array:
    """float32 [rows, columns] of one expert's "gate", "up" or "down"."""
    words, scales = (
        (experts.down_words, experts.down_scales) if part == "down" else (experts.gate_up_words, experts.gate_up_scales)
    )
    words, scales = (
        lax.dynamic_index_in_dim(a, expert, keepdims=False)[:, :, int(part == "up")] for a in (words, scales)
    )
    planes = [(words >> jnp.int16(4 * i)) & jnp.int16(15) for i in range(4)]
    q = jnp.stack(planes, axis=3).astype(jnp.float32) - 8.0  # row blocks, column blocks, row, plane, column
    halves = lax.bitcast_convert_type(scales, jnp.bfloat16).astype(jnp.float32)  # ..., pair, row, half
    scale = halves.swapaxes(2, 3).reshape(*q.shape[:4])
    w = (q * scale[..., None]).swapaxes(1, 2)
    return w.reshape(w.shape[0] * BLOCK_ROWS, -1)
