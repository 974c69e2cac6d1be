"""Sampling noise as a counter-based hash: a token's draw depends on (seed, absolute position, token id) alone.

Autoregressive, chain and tree decoding, every slot and every vocabulary shard therefore draw the same numbers.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

KEY_WORD = np.uint32(0x6B646A78)  # "kdjx" in ASCII: keeps this stream apart from other uses of the same seed
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = UInt32[Array, "..."]


def _high_word(a: int, b: Words) -> Words:
    """Upper 32 bits of the 64-bit product, from 16-bit limbs because 64-bit integers need x64 mode."""
    low_mask = np.uint32(0xFFFF)
    a_low, a_high = np.uint32(a & 0xFFFF), np.uint32(a >> 16)
    b_low, b_high = b & low_mask, b >> 16
    middle = a_high * b_low + ((a_low * b_low) >> 16)  # below 2^32: (2^16 - 1)^2 + 2^16 - 1
    carry = a_low * b_high + (middle & low_mask)
    return a_high * b_high + (middle >> 16) + (carry >> 16)


def philox4x32_10(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"); shapes must agree."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(_ROUNDS):
        m0, m1 = _MULTIPLIERS
        low0, low1 = np.uint32(m0) * c0, np.uint32(m1) * c2
        c0, c1, c2, c3 = _high_word(m1, c2) ^ c1 ^ k0, low1, _high_word(m0, c0) ^ c3 ^ k1, low0
        if i + 1 < _ROUNDS:
            k0, k1 = k0 + np.uint32(_WEYL[0]), k1 + np.uint32(_WEYL[1])
    return c0, c1, c2, c3


def gumbel(
    seeds: UInt32[Array, "slots"], positions: Int[Array, "slots rows"], token_ids: Int[Array, "vocab"]
) -> Float[Array, "slots rows vocab"]:
    """Gumbel(0, 1) noise (float32) of each token at the absolute position it would take.

    `token_ids` are global ids, also on a vocabulary shard. u = ((word >> 9) + 1/2) 2^-23 is exact in float32 and lies
    strictly inside (0, 1): one bit more would round to 1, infinite noise, once in 2^24 draws.
    """
    shape = (*positions.shape, token_ids.shape[0])

    def spread(x: Array) -> Words:
        return jnp.broadcast_to(x.astype(jnp.uint32), shape)

    zero = jnp.zeros(shape, jnp.uint32)
    counter = (spread(token_ids[None, None, :]), spread(positions[:, :, None]), zero, zero)
    word, *_ = philox4x32_10(counter, (spread(seeds[:, None, None]), jnp.full(shape, KEY_WORD)))
    u = ((word >> 9).astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return -jnp.log(-jnp.log(u))
