"""Sampling with noise that depends only on (seed, absolute position, token id): every decoding mode draws the same.

The noise is the Gumbel-max trick: argmax(logits / T + g), g = -log(-log(u)), is a sample of softmax(logits / T). The
uniform u of a token comes from Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, UInt32

from kdjax.config import Sampling
from kdjax.errors import KdjaxError

KEY_WORD = 0x6B646A78  # "kdjx" in ASCII: keeps this stream apart from other uses of the same seed
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))


def philox4x32_10(
    counter: tuple[UInt32[np.ndarray, "n"], ...], key: tuple[np.uint32, np.uint32]
) -> tuple[UInt32[np.ndarray, "n"], ...]:
    """Ten rounds of Philox on four counter words and two key words (Salmon et al. 2011, section 3.3)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    with np.errstate(over="ignore"):  # the key schedule wraps around by definition
        for _ in range(10):
            product0 = _MULTIPLIERS[0] * c0.astype(np.uint64)
            product1 = _MULTIPLIERS[1] * c2.astype(np.uint64)
            high0, high1 = (product0 >> np.uint64(32)).astype(np.uint32), (product1 >> np.uint64(32)).astype(np.uint32)
            c0, c1, c2, c3 = (
                high1 ^ c1 ^ k0,
                (product1 & low).astype(np.uint32),
                high0 ^ c3 ^ k1,
                (product0 & low).astype(np.uint32),
            )
            k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return c0, c1, c2, c3


def uniform(seed: int, position: int, token_ids: Int[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """u of each token id at the absolute `position` it would take: 23 random bits, centred, exact in float32."""
    ids = token_ids.astype(np.uint32)
    zero = np.zeros_like(ids)
    word, *_ = philox4x32_10(
        (ids, np.full_like(ids, position), zero, zero), (np.uint32(seed & 0xFFFFFFFF), np.uint32(KEY_WORD))
    )
    return ((word >> np.uint32(9)) + 0.5) * 2.0**-23


def gumbel(seed: int, position: int, token_ids: Int[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """-log(-log(u)) of `uniform`: argmax of logits / T plus this is a sample of softmax(logits / T)."""
    return -np.log(-np.log(uniform(seed, position, token_ids)))


def kept(logits: Float[np.ndarray, "vocab"], sampling: Sampling) -> Bool[np.ndarray, "vocab"]:
    """Tokens that pass every filter, each applied to p = softmax(logits / T); equal p are ordered by token id.

    top_k: the k most likely. top_p: the shortest prefix of that order whose mass reaches top_p.
    min_p: p of at least min_p times the largest p.
    """
    scaled = logits.astype(np.float64) / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = np.ones(len(p), bool)
    if sampling.top_k:
        keep[order[sampling.top_k :]] = False
    if sampling.top_p < 1.0:
        mass_before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        keep[order[mass_before >= sampling.top_p]] = False
    return keep & (p >= sampling.min_p * p.max())


def sample(logits: Float[np.ndarray, "vocab"], sampling: Sampling, seed: int, position: int) -> int:
    """The token at absolute `position`: argmax at temperature 0, else Gumbel-max over kept ones; lowest id on ties.

    Raises:
        KdjaxError: NaN logits.
    """
    if np.isnan(logits).any():
        raise KdjaxError(f"logits of position {position} contain NaN: check the weights and the input of the model")
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    scores = logits.astype(np.float64) / sampling.temperature + gumbel(seed, position, np.arange(len(logits)))
    return int(np.argmax(np.where(kept(logits, sampling), scores, -np.inf)))
