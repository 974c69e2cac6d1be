"""Log-likelihoods of given continuations, in batches: the `loglikelihood` convention of lm-evaluation-harness."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float32, Int32

from kdjax.checkpoint import Target
from kdjax.config import DecodeConfig
from kdjax.decode import Decoder, loop
from kdjax.decode.drafting import Params
from kdjax.decode.state import DecodeState
from kdjax.errors import KdjaxError
from kdjax.model import k2
from kdjax.model.runtime import Runtime

CHUNK = 128
"""Tokens of each row per forward pass."""

Tokens = tuple[int, ...]


class Continuation(NamedTuple):
    """`log_likelihood` in nats of all tokens of a continuation; `is_greedy`: each is the model's own first choice."""

    log_likelihood: float
    is_greedy: bool


def encode_pair(encode: Callable[[str], list[int]], context: str, continuation: str) -> tuple[Tokens, Tokens]:
    """Token ids of both, split where the context's own encoding ends.

    Spaces at the end of the context go to the continuation, where tokenizers have them.
    """
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    whole, before = encode(kept + continuation), encode(kept)
    return tuple(whole[: len(before)]), tuple(whole[len(before) :])


class ContinuationScorer:
    """Scores pairs of context and continuation, `rows` different texts at a time.

    Continuations of one token after the same context share a row, as the letters of a multiple choice do.

    Args:
        target: the model.
        runtime: numerics and mesh, the same as the model was loaded with.
        rows: texts per forward pass.
    """

    def __init__(self, target: Target, runtime: Runtime, *, rows: int = 8):
        plain = DecodeConfig(mode="autoregressive", budget=0)
        self._decoder = Decoder(target, None, plain, runtime, slots=rows)
        self._rows, self.window = rows, target.config.max_position_embeddings

    def scores(self, pairs: Sequence[tuple[Tokens, Tokens]], longest: int = 0) -> Iterator[tuple[int, Continuation]]:
        """With the index of their pair, longest texts first. A context that is too long loses its beginning.

        Room is made for the longest text, or for one of `longest` tokens: scores of some pairs of a larger set equal
        those of the whole set to the last bit where `longest` is the same.

        Raises KdjaxError where a context or a continuation is empty, or a continuation exceeds the model's context.
        """
        texts: dict[tuple[Tokens, int], list[int]] = collections.defaultdict(list)
        for index, (context, continuation) in enumerate(pairs):
            if not context or not continuation:
                empty = "continuation" if context else "context"
                raise KdjaxError(f"pair {index}: the {empty} has no tokens: give at least one")
            if len(continuation) > self.window:
                raise KdjaxError(
                    f"pair {index}: the continuation has {len(continuation)} tokens, the model's context is "
                    f"{self.window}: shorten it"
                )
            read = (*context, *continuation[:-1])[-self.window :]
            texts[read, len(continuation)].append(index)
        order = sorted(texts.items(), key=lambda item: -len(item[0][0]))
        longest = min(max([longest, *(len(read) for read, _ in texts)]), self.window)
        chunks = -(-longest // CHUNK)
        capacity = CHUNK * 2 ** (chunks - 1).bit_length()  # of few different sizes: each is compiled
        for start in range(0, len(order), self._rows):
            yield from self._batch(pairs, order[start : start + self._rows], capacity)

    def _batch(
        self,
        pairs: Sequence[tuple[Tokens, Tokens]],
        batch: Sequence[tuple[tuple[Tokens, int], list[int]]],
        capacity: int,
    ) -> Iterator[tuple[int, Continuation]]:
        longest = max(len(read) for (read, _), _ in batch)
        columns = -(-longest // CHUNK) * CHUNK
        group = max(len(indices) for _, indices in batch)
        read = np.zeros((self._rows, columns), np.int32)
        labels = np.zeros((self._rows, columns, group), np.int32)
        for row, ((tokens, length), indices) in enumerate(batch):
            read[row, : len(tokens)] = tokens
            for at, index in enumerate(indices):
                labels[row, len(tokens) - length : len(tokens), at] = pairs[index][1]
        log_p, best = self._forward(read, labels, capacity)
        for row, ((tokens, length), indices) in enumerate(batch):
            scored = slice(len(tokens) - length, len(tokens))
            for at, index in enumerate(indices):
                yield index, Continuation(float(log_p[row, scored, at].sum()), bool(best[row, scored, at].all()))

    def _forward(self, read: np.ndarray, labels: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities in float64 of the labels, and whether each is the best token."""
        state = self._decoder.empty(capacity)
        parts = []
        for start in range(0, read.shape[1], CHUNK):
            columns = slice(start, start + CHUNK)
            state, log_p, best = _score(
                self._decoder.program, self._decoder.params, state, read[:, columns], labels[:, columns]
            )
            parts.append((np.asarray(log_p, np.float64), np.asarray(best)))
        all_log_p, all_best = zip(*parts, strict=True)
        return np.concatenate(all_log_p, 1), np.concatenate(all_best, 1)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def _score(
    program: loop.Program,
    params: Params,
    state: DecodeState,
    tokens: Int32[Array, "rows chunk"],
    labels: Int32[Array, "rows chunk group"],
) -> tuple[DecodeState, Float32[Array, "rows chunk group"], Bool[Array, "rows chunk group"]]:
    def read(
        params: Params, state: DecodeState, tokens: Int32[Array, "rows chunk"]
    ) -> tuple[DecodeState, Float32[Array, "rows chunk part"]]:
        model, runtime, before = program.model, program.runtime, state.cache.lengths
        positions = before[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        out = k2.forward(params.target, model, tokens, positions, state.cache, runtime=runtime)
        cache = dataclasses.replace(out.cache, lengths=before + tokens.shape[1])
        return dataclasses.replace(state, cache=cache), k2.logits(params.target, model, out.hidden, runtime)

    vocabulary = PartitionSpec(None, None, program.vocabulary_axes or None)
    state, logits = loop.on_mesh(program, read, params, state, tokens, out_specs=lambda specs: (specs, vocabulary))
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), labels, 2)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, :, None] == labels
    return state, log_p, best
