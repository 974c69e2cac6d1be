"""Choosing the next token: temperature, filters and Gumbel-max with counter-based noise.

`axes` are those of the mesh over which the vocabulary is split in order of id; each device draws the noise of its own
tokens, and only maxima, counts of candidates and their ids are exchanged. The choice is the same on every device.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from kdjax.config import Sampling
from kdjax.config.mesh import Axes
from kdjax.decode.noise import gumbel
from kdjax.model import parallel
from kdjax.tree.marginals import log_normaliser, sharded_top_k, top_k

_HEAD = 128
"""Tokens looked at first when cutting by mass."""


def _ids(x: Float[Array, "*rows vocab"], axes: Axes) -> Int[Array, "*rows vocab"]:
    """Global token ids of this device's part."""
    return lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) + x.shape[-1] * parallel.index(axes)


def largest(x: Float[Array, "*rows vocab"], axes: Axes = ()) -> Float[Array, "*rows 1"]:
    """The maximum of each row, NaN where it has one."""
    # Gathered and not an all-reduce of maxima, which may lose a NaN.
    return jnp.max(parallel.gather_last(jnp.max(x, axis=-1, keepdims=True), axes), axis=-1, keepdims=True)


def kept(
    scaled: Float[Array, "*rows vocab"], sampling: Sampling, axes: Axes = (), *, backend: str = "xla"
) -> Bool[Array, "*rows vocab"]:
    """Tokens that pass every filter, each applied to p = softmax(logits / T); equal p are ordered by token id.

    top_k: the k most likely. top_p: the shortest prefix of that order whose mass reaches `top_p`.
    min_p: p of at least `min_p` times the largest p.
    """
    keep = jnp.ones(scaled.shape, bool)
    vocab = scaled.shape[-1] * parallel.parts(axes)
    by_rank = 0 < sampling.top_k < vocab
    by_mass = sampling.top_p < 1
    if by_rank or by_mass:
        # Infinite, not 1: rounded sums may reach 1 before the k-th token.
        mass = np.float32(sampling.top_p if by_mass else np.inf)
        cut, cut_id = _last_of_prefix(scaled, sampling.top_k if by_rank else vocab, mass, axes, backend)
        keep = (scaled > cut) | ((scaled == cut) & (_ids(scaled, axes) <= cut_id))
    if sampling.min_p > 0:
        keep &= scaled >= largest(scaled, axes) + np.float32(np.log(sampling.min_p))
    return keep


def _last_of_prefix(
    scaled: Float[Array, "*rows vocab"], length: int, mass: np.float32, axes: Axes, backend: str
) -> tuple[Float[Array, "*rows 1"], Int[Array, "*rows 1"]]:
    """Value and id of the last token of the shortest prefix of the order that reaches `mass`, at most `length` long."""
    log_z = log_normaliser(scaled, axes)[..., None]

    def within(width: int) -> tuple[Array, Array, Array]:
        find = functools.partial(sharded_top_k, axis_name=axes) if axes else top_k
        values, order = find(scaled, width, backend=backend)
        p = jnp.exp(values - log_z)
        before = jnp.cumsum(p, axis=-1) - p
        last = jnp.sum(before < mass, axis=-1, keepdims=True, dtype=jnp.int32) - 1
        reached = jnp.all(before[..., -1] + p[..., -1] >= mass)
        return jnp.take_along_axis(values, last, axis=-1), jnp.take_along_axis(order, last, axis=-1), reached

    if length <= _HEAD or np.isinf(mass):
        return within(length)[:2]
    cut, cut_id, reached = within(_HEAD)
    # A full sort costs ten times the rest of sampling, and nearly always the head holds the mass.
    return lax.cond(reached, lambda: (cut, cut_id), lambda: within(length)[:2])


def first_largest(x: Float[Array, "*rows vocab"], axes: Axes = ()) -> Int[Array, "*rows"]:
    """argmax as int32 by two plain reductions: XLA's CPU backend runs an argmax one element at a time.

    Where a row has NaN the result is unspecified (its largest value is NaN, which callers look for).
    """
    last = x.shape[-1] * parallel.parts(axes) - 1
    own = jnp.min(jnp.where(x == largest(x, axes), _ids(x, axes), last), axis=-1, keepdims=True)
    return jnp.min(parallel.gather_last(own, axes), axis=-1)


def sample(
    logits: Float[Array, "slots rows vocab"],
    positions: Int[Array, "slots rows"],
    seeds: UInt32[Array, "slots"],
    sampling: Sampling,
    axes: Axes = (),
    *,
    backend: str = "xla",
) -> Int[Array, "slots rows"]:
    """The token for each row at the absolute `positions` it will take; lowest id on ties. Float32 logits.

    Work that the (static) sampling configuration does not need is not compiled in. `backend` is that of the runtime.
    """
    if sampling.temperature == 0:
        return first_largest(logits, axes)
    scaled = logits / np.float32(sampling.temperature)
    own = jnp.arange(logits.shape[-1], dtype=jnp.int32) + logits.shape[-1] * parallel.index(axes)
    scores = scaled + gumbel(seeds, positions, own)
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
        scores = jnp.where(kept(scaled, sampling, axes, backend=backend), scores, -jnp.inf)
    return first_largest(scores, axes)
