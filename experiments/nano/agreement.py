"""Where decoding modes part although each follows the target: at scores that are equal but for float32 rounding.

The modes run the target over different numbers of rows, so its logits differ in their last bits. That decides a token
only where the two best scores are closer than this, which a float64 run of the reference shows.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import msgspec
import numpy as np

from kdjax.config import ModelConfig
from kdjax.reference import model, sampling
from kdjax.reference.checkpoint import Params, read_target

ROUNDING = 2e-5
"""Scores below 40 in float32, whose unit in the last place is 4e-6: a larger gap would be an error in decoding."""


class Parting(msgspec.Struct, frozen=True):
    """Two modes chose other tokens after the same text: where, and how far apart the scores are in float64."""

    temperature: float
    domain: str
    prompt: int
    after: int
    tokens: tuple[int, int]
    gap: float

    @property
    def is_rounding(self) -> bool:
        return self.gap < ROUNDING


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first tokens that differ; a text that goes on where the other ends differs there as well."""
    if one == other:
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Referee:
    """The float64 reference of a checkpoint."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._config: ModelConfig
        self._params: Params
        self._config, self._params = read_target(folder)

    def gap(self, text: Sequence[int], tokens: tuple[int, int], temperature: float, seed: int) -> float:
        """Distance of the scores of two tokens that may follow `text`."""
        ids = np.asarray(text)
        out = model.forward(self._params, self._config, ids, np.arange(len(ids)), model.empty_cache(self._config))
        scores = model.logits(self._params, out.hidden[-1:])[0]
        if temperature:
            scores = scores / temperature + sampling.gumbel(seed, len(ids), np.arange(len(scores)))
        return float(abs(scores[tokens[0]] - scores[tokens[1]]))
