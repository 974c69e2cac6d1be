"""Choosing the next token: temperature, filters and Gumbel-max with counter-based noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from kdjax.decode.noise import gumbel
from kdjax.errors import KdjaxError
from kdjax.tree.marginals import top_k


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 switch their filter off. Hashable."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < np.inf):
            raise KdjaxError(f"temperature={self.temperature} must be finite and at least 0: 0 is greedy decoding")
        if self.top_k < 0:
            raise KdjaxError(f"top_k={self.top_k} is negative: use 0 to keep every token")
        if not (0 < self.top_p <= 1):
            raise KdjaxError(f"top_p={self.top_p} must lie in (0, 1]: use 1 to keep every token")
        if not (0 <= self.min_p <= 1):
            raise KdjaxError(f"min_p={self.min_p} must lie in [0, 1]: use 0 to keep every token")


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
        # Without top_p only the first k of the order matter; the prefix of top_p may need all of it.
        length = sampling.top_k if by_rank else vocab
        values, order = top_k(scaled, length)
        chosen = jnp.ones(order.shape, bool)
        if by_mass:
            p = jnp.exp(values - jax.nn.logsumexp(scaled, axis=-1, keepdims=True))
            chosen = jnp.cumsum(p, axis=-1) - p < np.float32(sampling.top_p)
        # A token passes if it comes no later in the order than the last chosen one.
        last = jnp.sum(chosen, axis=-1, keepdims=True, dtype=jnp.int32) - 1
        cut = jnp.take_along_axis(values, last, axis=-1)
        cut_id = jnp.take_along_axis(order, last, axis=-1)
        ids = lax.broadcasted_iota(jnp.int32, scaled.shape, scaled.ndim - 1)
        keep = (scaled > cut) | ((scaled == cut) & (ids <= cut_id))
    if sampling.min_p > 0:
        peak = jnp.max(scaled, axis=-1, keepdims=True)
        keep &= scaled >= peak + np.float32(np.log(sampling.min_p))
    return keep


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
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scaled = logits / np.float32(sampling.temperature)
    scores = scaled + gumbel(seeds, positions, jnp.arange(logits.shape[-1], dtype=jnp.int32))
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
        scores = jnp.where(kept(scaled, sampling), scores, -jnp.inf)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)
