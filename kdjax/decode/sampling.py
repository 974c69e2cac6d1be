"""Choosing the next token: temperature, filters and Gumbel-max with counter-based noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from kdjax.config import Sampling
from kdjax.decode.noise import gumbel
from kdjax.tree.marginals import top_k

_HEAD = 128
"""Tokens looked at first when cutting by mass."""


def kept(scaled: Float[Array, "*rows vocab"], sampling: Sampling) -> Bool[Array, "*rows vocab"]:
    """Tokens that pass every filter, each applied to p = softmax(logits / T); equal p are ordered by token id.

    top_k: the k most likely. top_p: the shortest prefix of that order whose mass reaches `top_p`.
    min_p: p of at least `min_p` times the largest p.
    """
    keep = jnp.ones(scaled.shape, bool)
    vocab = scaled.shape[-1]
    by_rank = 0 < sampling.top_k < vocab
    by_mass = sampling.top_p < 1
    if by_rank or by_mass:
        # Infinite, not 1: rounded sums may reach 1 before the k-th token.
        mass = np.float32(sampling.top_p if by_mass else np.inf)
        cut, cut_id = _last_of_prefix(scaled, sampling.top_k if by_rank else vocab, mass)
        ids = lax.broadcasted_iota(jnp.int32, scaled.shape, scaled.ndim - 1)
        keep = (scaled > cut) | ((scaled == cut) & (ids <= cut_id))
    if sampling.min_p > 0:
        peak = jnp.max(scaled, axis=-1, keepdims=True)
        keep &= scaled >= peak + np.float32(np.log(sampling.min_p))
    return keep


def _last_of_prefix(
    scaled: Float[Array, "*rows vocab"], length: int, mass: np.float32
) -> tuple[Float[Array, "*rows 1"], Int[Array, "*rows 1"]]:
    """Value and id of the last token of the shortest prefix of the order that reaches `mass`, at most `length` long."""
    log_z = jax.nn.logsumexp(scaled, axis=-1, keepdims=True)

    def within(width: int) -> tuple[Array, Array, Array]:
        values, order = top_k(scaled, width)
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


def first_largest(x: Float[Array, "*rows vocab"]) -> Int[Array, "*rows"]:
    """argmax as int32 by two plain reductions: XLA's CPU backend runs an argmax one element at a time.

    Where a row has NaN the result is unspecified (its largest value is NaN, which callers look for).
    """
    ids = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), ids, x.shape[-1] - 1), axis=-1)


def sample(
    logits: Float[Array, "slots rows vocab"],
    positions: Int[Array, "slots rows"],
    seeds: UInt32[Array, "slots"],
    sampling: Sampling,
) -> Int[Array, "slots rows"]:
    """The token for each row at the absolute `positions` it will take; lowest id on ties. Float32 logits.

    Work that the (static) sampling configuration does not need is not compiled in.
    """
    if sampling.temperature == 0:
        return first_largest(logits)
    scaled = logits / np.float32(sampling.temperature)
    scores = scaled + gumbel(seeds, positions, jnp.arange(logits.shape[-1], dtype=jnp.int32))
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
        scores = jnp.where(kept(scaled, sampling), scores, -jnp.inf)
    return first_largest(scores)
