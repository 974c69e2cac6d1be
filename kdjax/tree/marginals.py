"""Top tokens and log-probabilities of every draft depth, also where the vocabulary is split over a mesh axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kdjax.tree.backends import runs_kernels
from pallas_kernels import draft_tree
from pallas_kernels.draft_tree import TopK

MOST_CHOSEN = 256
"""The kernel takes its tokens one after another: beyond this a sort is faster."""


def _chosen(logits: Float[Array, "*rows vocab"], k: int, backend: str) -> TopK:
    if runs_kernels(backend) and k <= MOST_CHOSEN:
        *rows, vocab = logits.shape
        found = draft_tree.top_k(logits.reshape(-1, vocab), k, interpret=backend == "interpret")
        return TopK(*(part.reshape(*rows, *part.shape[1:]) for part in found))
    x = logits.astype(jnp.float32)
    # top_k orders -0.0 below 0.0, which would break a tie that the tree's definition leaves to the token id.
    x = jnp.where(x == 0, jnp.zeros_like(x), x)
    values, ids = lax.top_k(x, k)
    lse = jax.nn.logsumexp(x, axis=-1)
    return TopK(values, ids.astype(jnp.int32), lse, values - lse[..., None])


def top_k(
    logits: Float[Array, "*rows vocab"], k: int, *, backend: str = "xla"
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """The k largest logits in falling order with their token ids, lowest id first among equal ones; float32.

    `backend` is that of the runtime. More than MOST_CHOSEN are sorted by XLA on every backend.

    Raises:
        KdjaxError: no such backend.
    """
    return _chosen(logits, k, backend)[:2]


def merge_top_k(
    values: Float[Array, "*rows n"], ids: Int[Array, "*rows n"], k: int
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """The first k of the gathered lists of several vocabulary shards, by (logit falling, global token id rising)."""
    costs, merged = lax.sort((-values, ids), num_keys=2)
    return -costs[..., :k], merged[..., :k]


def sharded_top_k(
    logits: Float[Array, "*rows shard"], k: int, axis_name: str | tuple[str, ...], *, backend: str = "xla"
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """`top_k` of a vocabulary split over `axis_name` in order of id; called inside `shard_map`, equal on every shard.

    Each shard sends at most k values and ids, so the whole row never crosses the mesh. k may exceed a shard's width.
    """
    own = top_k(logits, min(k, logits.shape[-1]), backend=backend)
    return _gathered(*own, logits.shape[-1], k, axis_name)


def _gathered(
    values: Float[Array, "*rows n"],
    ids: Int[Array, "*rows n"],
    width: int,
    k: int,
    axis_name: str | tuple[str, ...],
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    ids = ids + lax.axis_index(axis_name).astype(jnp.int32) * width
    axis = values.ndim - 1
    values, ids = (lax.all_gather(x, axis_name, axis=axis, tiled=True) for x in (values, ids))
    return merge_top_k(values, ids, k)


def log_normaliser(logits: Float[Array, "*rows vocab"], axes: tuple[str, ...] = ()) -> Float[Array, "*rows"]:
    """log sum exp over the vocabulary, which may be split over `axes`."""
    own = jax.nn.logsumexp(logits, axis=-1)
    return jax.nn.logsumexp(lax.all_gather(own, axes), axis=0) if axes else own


def marginals(
    logits: Float[Array, "slots depth vocab"], k: int, axes: tuple[str, ...] = (), *, backend: str = "xla"
) -> tuple[Float[Array, "slots depth k"], Int[Array, "slots depth k"]]:
    """Log-probabilities (float32) and token ids of the k most likely tokens per depth, lowest id first on ties.

    lp = float32(logit) - float32(logsumexp), both rounded before the subtraction as in the DDTree reference code: sums
    of such values are exact, so that nodes of equal score stay equal. `logits` may be this device's part of a
    vocabulary that is split over mesh `axes`. `backend` as in `top_k`.
    """
    width = logits.shape[-1]
    own = _chosen(logits, min(k, width), backend)
    if not axes:
        return own.lp, own.ids
    values, ids = _gathered(own.values, own.ids, width, k, axes)
    return values - jax.nn.logsumexp(lax.all_gather(own.lse, axes), axis=0)[..., None], ids
