"""Bits per byte of text by rolling windows, the `loglikelihood_rolling` convention of lm-evaluation-harness.

Every token of the text is scored exactly once, the first one after a start token. The first window scores as many
tokens as it holds; each further window scores the next `stride` tokens and fills the rest of its room with the text
before them. `stride` equal to the window gives the harness's disjoint windows; a smaller one costs more forward passes
and gives every token after the first window at least `window - stride + 1` tokens of context. The sum of the tokens'
bits divided by the UTF-8 bytes of the text does not depend on the tokenizer, so that it compares with other models and
with compressors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from kdjax.checkpoint import Target
from kdjax.errors import KdjaxError
from kdjax.evaluate.forward import CHUNK, Forward
from kdjax.model.runtime import Runtime


class Score(NamedTuple):
    """Information content of text under a model: `bits` (base 2) of `tokens` tokens that encode `bytes` UTF-8 bytes."""

    bits: float
    bytes: int
    tokens: int

    @property
    def bits_per_byte(self) -> float:
        """Bits over UTF-8 bytes: independent of the tokenizer."""
        return self.bits / self.bytes


def pool(scores: Iterable[Score]) -> Score:
    """Sums over several texts: its `bits_per_byte` is weighted by bytes."""
    bits, size, tokens = map(sum, zip(*scores, strict=True))
    return Score(bits, size, tokens)


class Window(NamedTuple):
    """The model reads tokens `first` .. `last` - 1 of [start token, text]; text tokens from `scored` on are scored.

    Token i of the text is predicted from row i of that sequence, so the window scores tokens `scored` .. `last` - 1.
    """

    first: int
    scored: int
    last: int


def windows(n_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Windows of at most `window` tokens that score each of `n_tokens` exactly once, in order.

    Raises KdjaxError unless 1 <= stride <= window.
    """
    if not 1 <= stride <= window:
        raise KdjaxError(f"stride={stride} must lie in 1 to the window of {window} tokens")
    scored, last = 0, min(window, n_tokens)
    while scored < n_tokens:
        yield Window(max(last - window, 0), scored, last)
        scored, last = last, min(last + stride, n_tokens)


class Scorer:
    """Scores texts with one compiled program.

    Args:
        target: the model.
        runtime: numerics, the same as the model was loaded with.
        window: tokens the model reads at once; default is its max_position_embeddings.
        stride: tokens scored by every window but the first; default half the window.
        chunk: tokens per forward pass.

    Raises:
        KdjaxError: the window exceeds the model's context, or the stride the window.
    """

    def __init__(
        self,
        target: Target,
        runtime: Runtime,
        *,
        window: int | None = None,
        stride: int | None = None,
        chunk: int = CHUNK,
    ):
        limit = target.config.max_position_embeddings
        self.window = limit if window is None else window
        if not 1 <= self.window <= limit:
            raise KdjaxError(f"window={self.window} must lie in 1 to the model's max_position_embeddings={limit}")
        self.stride = max(self.window // 2, 1) if stride is None else stride
        next(windows(1, self.window, self.stride))  # raises where they do not fit
        self._forward = Forward(target, runtime, context=self.window, chunk=chunk)

    def text(
        self,
        text: str,
        encode: Callable[[str], list[int]],
        start_token: int,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> Score:
        """`text` as one document; `progress` receives the number of tokens after each window.

        Raises KdjaxError where the text is empty.
        """
        ids = encode(text)
        if not ids:
            raise KdjaxError("the text to score is empty: give at least one byte")
        nats = 0.0
        for window in windows(len(ids), self.window, self.stride):
            nats -= float(self._log_likelihoods([start_token, *ids], window).sum())
            progress(window.last - window.scored)
        return Score(nats / math.log(2), len(text.encode()), len(ids))

    def _log_likelihoods(self, sequence: Sequence[int], window: Window) -> Float64[np.ndarray, "scored"]:
        """Of the tokens that the window scores."""
        read, follow = sequence[window.first : window.last], sequence[window.first + 1 : window.last + 1]
        return self._forward.log_likelihoods(read, follow)[window.scored - window.first :].astype(np.float64)
