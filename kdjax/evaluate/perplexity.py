"""Bits per byte of text by rolling windows, the `loglikelihood_rolling` convention of lm-evaluation-harness.

Every token of the text is scored exactly once, the first one after a start token. The first window scores as many
tokens as it holds; each further window scores the next `stride` tokens and fills the rest of its room with the text
before them. `stride` equal to the window gives the harness's disjoint windows; a smaller one costs more forward passes
and gives every token after the first window at least `window - stride + 1` tokens of context. The sum of the tokens'
bits divided by the UTF-8 bytes of the text does not depend on the tokenizer, so that it compares with other models and
with compressors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from kdjax.checkpoint import Target
from kdjax.config import ModelConfig
from kdjax.errors import KdjaxError
from kdjax.model import k2
from kdjax.model.cache import KVCache
from kdjax.model.runtime import Runtime

CHUNK = 256
"""Tokens per forward pass: large enough for dense matrix products, small enough that short texts waste little."""


class Score(NamedTuple):
    """Information content of text under a model."""

    bits: float
    bytes: int
    tokens: int

    @property
    def bits_per_byte(self) -> float:
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
        self._target, self._runtime, self._chunk = target, runtime, min(chunk, self.window)

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
            nats += float(self._nats([start_token, *ids], window).sum())
            progress(window.last - window.scored)
        return Score(nats / math.log(2), len(text.encode()), len(ids))

    def _nats(self, sequence: Sequence[int], window: Window) -> np.ndarray:
        """Negative log-likelihoods in nats, float64, of the tokens that the window scores."""
        config, size = self._target.config, self._chunk
        read = np.asarray(sequence[window.first : window.last], np.int32)
        follow = np.asarray(sequence[window.first + 1 : window.last + 1], np.int32)
        rows = -(-len(read) // size) * size
        read, follow = (np.pad(x, (0, rows - len(read))).reshape(-1, 1, size) for x in (read, follow))
        cache = KVCache.empty(config, 1, self.window + size, 0, self._runtime.cache_dtype)
        nats = []
        for tokens, labels in zip(read, follow, strict=True):
            cache, chunk = _score_chunk(self._target.params, tokens, labels, cache, config, self._runtime)
            nats.append(chunk)
        return np.concatenate([np.asarray(n[0], np.float64) for n in nats])[
            window.scored - window.first : window.last - window.first
        ]


@functools.partial(jax.jit, static_argnums=(4, 5), donate_argnums=3)
def _score_chunk(
    params: k2.Params,
    tokens: Int32[Array, "1 chunk"],
    labels: Int32[Array, "1 chunk"],
    cache: KVCache,
    config: ModelConfig,
    runtime: Runtime,
) -> tuple[KVCache, Float32[Array, "1 chunk"]]:
    size = tokens.shape[1]
    positions = cache.lengths[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
    out = k2.forward(params, config, tokens, positions, cache, runtime=runtime)
    log_p = jax.nn.log_softmax(k2.logits(params, config, out.hidden, runtime))
    nats = -jnp.take_along_axis(log_p, labels[:, :, None], 2)[:, :, 0]
    return dataclasses.replace(out.cache, lengths=cache.lengths + size), nats
