"""Top tokens and log-probabilities of every draft depth, also where the vocabulary is split over a mesh axis."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kdjax.tree import ranking


def top_k(logits: Float[Array, "*rows vocab"], k: int) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """The k largest logits in falling order with their token ids, lowest id first among equal ones."""
    # top_k orders -0.0 below 0.0, which would break a tie that the tree's definition leaves to the token id.
    logits = jnp.where(logits == 0, jnp.zeros_like(logits), logits)
    values, ids = lax.platform_dependent(
        logits, cpu=lambda x: tuple(lax.top_k(x, k)), default=functools.partial(ranking.top_k, k=k)
    )
    return values, ids.astype(jnp.int32)


def merge_top_k(
    values: Float[Array, "*rows n"], ids: Int[Array, "*rows n"], k: int
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """The first k of the gathered lists of several vocabulary shards, by (logit falling, global token id rising)."""
    costs, merged = lax.sort((-values, ids), num_keys=2)
    return -costs[..., :k], merged[..., :k]


def sharded_top_k(
    logits: Float[Array, "*rows shard"], k: int, axis_name: str | tuple[str, ...]
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """`top_k` of a vocabulary split over `axis_name` in order of id; called inside `shard_map`, equal on every shard.

    Each shard sends at most k values and ids, so the whole row never crosses the mesh. k may exceed a shard's width.
    """
    width = logits.shape[-1]
    values, ids = top_k(logits, min(k, width))
    ids = ids + lax.axis_index(axis_name).astype(jnp.int32) * width
    axis = values.ndim - 1
    values, ids = (lax.all_gather(x, axis_name, axis=axis, tiled=True) for x in (values, ids))
    return merge_top_k(values, ids, k)


def log_normaliser(logits: Float[Array, "*rows vocab"], axes: tuple[str, ...] = ()) -> Float[Array, "*rows"]:
    """log sum exp over the vocabulary, which may be split over `axes`."""
    own = jax.nn.logsumexp(logits, axis=-1)
    return jax.nn.logsumexp(lax.all_gather(own, axes), axis=0) if axes else own


def marginals(
    logits: Float[Array, "slots depth vocab"], k: int, axes: tuple[str, ...] = ()
) -> tuple[Float[Array, "slots depth k"], Int[Array, "slots depth k"]]:
    """Log-probabilities (float32) and token ids of the k most likely tokens per depth, lowest id first on ties.

    lp = float32(logit) - float32(logsumexp), both rounded before the subtraction as in the DDTree reference code: sums
    of such values are exact, so that nodes of equal score stay equal. `logits` may be this device's part of a
    vocabulary that is split over mesh `axes`.
    """
    logits = logits.astype(jnp.float32)
    values, ids = sharded_top_k(logits, k, axes) if axes else top_k(logits, k)
    return values - log_normaliser(logits, axes)[..., None], ids
