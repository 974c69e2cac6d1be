"""Texts of small models that run in circles: drafts of them are accepted too easily to tell anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

LOOP_WINDOW, LOOP_NGRAM, LOOP_REPEATS = 64, 8, 4
REPEATED = 0.9


def looping(tokens: Int[np.ndarray, "rows seq"]) -> Bool[np.ndarray, " rows"]:
    """Rows in whose last 64 tokens some 8-gram occurs more than four times."""
    tail = tokens[:, -LOOP_WINDOW:].astype(np.uint64)
    grams = np.zeros((len(tail), tail.shape[1] - LOOP_NGRAM + 1), np.uint64)
    for i in range(LOOP_NGRAM):
        grams = grams * np.uint64(1_000_003) + tail[:, i : i + grams.shape[1]]
    grams = np.sort(grams, axis=1)
    return (grams[:, LOOP_REPEATS:] == grams[:, :-LOOP_REPEATS]).any(axis=1)


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether some 8-gram occurs more than four times in the last 64 tokens."""
    return len(token_ids) >= LOOP_NGRAM + LOOP_REPEATS and bool(looping(np.asarray([token_ids]))[0])


def repeats(token_ids: Sequence[int]) -> bool:
    """Whether the last 64 tokens repeat what stands up to 64 tokens before them, nine tenths of it at one lag.

    Catches the loops of longer period, such as a function written again and again, that `is_loop` lets pass.
    """
    tokens = np.asarray(token_ids)
    lags = range(1, min(LOOP_WINDOW, len(tokens) - LOOP_WINDOW) + 1)
    return any(np.mean(tokens[-LOOP_WINDOW:] == tokens[-LOOP_WINDOW - lag : -lag]) >= REPEATED for lag in lags)
