"""The shapes that are measured and tuned, with random data for them."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

RANK, ROPE = 512, 64
SCALE = 0.1447  # K2.6: 192 ** -0.5 times the square of YaRN's mscale
L2_BYTES = 128 * 2**20
MAX_COPIES = 48


@dataclasses.dataclass(frozen=True)
class Case:
    heads: int
    tokens: int
    streams: int
    prefix: int

    @property
    def cache_rows(self) -> int:
        return self.prefix + 64

    @property
    def cache_bytes(self) -> int:
        """What has to be read: every live cache row once."""
        return self.streams * (self.prefix + self.tokens) * (RANK + ROPE) * 2

    @property
    def flops(self) -> int:
        return self.streams * self.tokens * self.heads * (self.prefix + self.tokens) * 2 * (2 * RANK + ROPE)

    @property
    def copies(self) -> int:
        """Caches to alternate between, so that L2 does not hold them."""
        return max(1, min(MAX_COPIES, L2_BYTES // self.cache_bytes))


PREFIXES = tuple(2**10 * n for n in (1, 8, 32, 128))
CASES = (
    *(Case(8, tokens, streams, p) for tokens, streams in ((8, 1), (8, 10), (32, 1), (32, 10)) for p in PREFIXES),
    *(Case(8, 1, streams, p) for streams in (10, 1) for p in PREFIXES),
    *(Case(64, 8, 1, p) for p in PREFIXES),
    *(Case(8, 9, streams, 2**15) for streams in (1, 10)),
    *(Case(8, 16, streams, 2**15) for streams in (1, 10)),
    *(Case(8, tokens, streams, 2**12) for tokens, streams in ((1, 1), (8, 1), (32, 1), (8, 10))),
)


class Data(NamedTuple):
    q_latent: Float[Array, "slots q heads rank"]
    q_rope: Float[Array, "slots q heads rope"]
    caches: list[Float[Array, "slots rows width"]]
    lengths: Int32[Array, "slots"]
    ancestors: Bool[Array, "slots q q"]


def random_data(case: Case, seed: int) -> Data:
    """Queries, caches and random trees (parents before children); cases of one size and seed share their caches."""
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    shape = (case.streams, case.tokens, case.heads)
    query = 0.3 * jax.random.normal(key, (*shape, RANK + ROPE), jnp.float32)
    query = query.astype(jnp.bfloat16)
    return Data(
        query[..., :RANK],
        query[..., RANK:],
        caches(seed, case.streams, case.cache_rows, case.copies),
        jnp.full((case.streams,), case.prefix, jnp.int32),
        jnp.asarray(random_trees(rng, case.streams, case.tokens)),
    )


@functools.cache
def caches(seed: int, streams: int, rows: int, copies: int) -> list[Float[Array, "slots rows width"]]:
    """Uniform values, made stream by stream: random bits for ten long caches at once would not fit in memory."""

    @jax.jit
    def one(key: Array) -> Float[Array, "rows width"]:
        return jax.random.uniform(key, (rows, RANK + ROPE), jnp.bfloat16, -1.2, 1.2)

    keys = jax.random.split(jax.random.key(seed), (copies, streams))
    return [jnp.stack([one(key) for key in of_copy]) for of_copy in keys]


def random_trees(rng: np.random.Generator, streams: int, tokens: int) -> Bool[np.ndarray, "slots q q"]:
    masks = np.tile(np.eye(tokens, dtype=bool), (streams, 1, 1))
    for mask in masks:
        for i in range(1, tokens):
            mask[i] |= mask[rng.integers(0, i)]
    return masks
