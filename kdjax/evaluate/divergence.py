"""Where two decodings of one text part: at which token, and how far apart the scores were.

The modes run the target over different numbers of rows, so its logits differ in their last bits. In float32 that
decides a token only where the two best scores are closer than `ROUNDING`, which a float64 run of the reference shows.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Float64

from kdjax.config import ModelConfig
from kdjax.reference import model, sampling
from kdjax.reference.checkpoint import Params, read_target

ROUNDING = 2e-5
"""Scores below 40 in float32, whose unit in the last place is 4e-6: a larger gap would be an error in decoding."""


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first tokens that differ; a text that goes on where the other ends differs there as well."""
    if one == other:
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def margins(scores: Float[np.ndarray, "*rows vocab"]) -> Float[np.ndarray, "*rows"]:
    """Gaps between the two best scores."""
    best = np.partition(scores, -2)[..., -2:]
    return np.asarray(best[..., 1] - best[..., 0])


def perturbed(
    logits: Float[np.ndarray, "vocab"], position: int, temperature: float, seed: int
) -> Float64[np.ndarray, "vocab"]:
    """The scores whose maximum is drawn at absolute `position`; the logits themselves where `temperature` is 0."""
    scores = logits.astype(np.float64)
    return scores / temperature + sampling.gumbel(seed, position, np.arange(len(scores))) if temperature else scores


class Referee:
    """The float64 reference of a checkpoint."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._config: ModelConfig
        self._params: Params
        self._config, self._params = read_target(folder)

    def logits(self, text: Sequence[int]) -> Float64[np.ndarray, "n vocab"]:
        """Scores of what may follow each token of `text`."""
        return model.logits(self._params, self._hidden(text))

    def scores(self, text: Sequence[int], temperature: float = 0.0, seed: int = 0) -> Float64[np.ndarray, "vocab"]:
        """Of what may follow `text`: whoever has the highest is chosen."""
        return perturbed(model.logits(self._params, self._hidden(text)[-1:])[0], len(text), temperature, seed)

    def gap(self, text: Sequence[int], tokens: tuple[int, int], temperature: float, seed: int) -> float:
        """Distance of the scores of two tokens that may follow `text`."""
        scores = self.scores(text, temperature, seed)
        return float(abs(scores[tokens[0]] - scores[tokens[1]]))

    def _hidden(self, text: Sequence[int]) -> Float64[np.ndarray, "n hidden"]:
        ids, config = np.asarray(text), self._config
        return model.forward(self._params, config, ids, np.arange(len(ids)), model.empty_cache(config)).hidden
