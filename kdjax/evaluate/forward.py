"""Causal passes of a target over one text, in chunks, on one device or a mesh: what scoring needs of a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32, Int32

from kdjax.checkpoint import Target
from kdjax.config import DecodeConfig
from kdjax.decode import Decoder, loop
from kdjax.decode.drafting import Params
from kdjax.decode.state import DecodeState
from kdjax.errors import KdjaxError
from kdjax.model import k2
from kdjax.model.runtime import Runtime

CHUNK = 256
"""Tokens per forward pass: large enough for dense matrix products, small enough that short texts waste little."""


class Forward:
    """One compiled program per use, for texts of up to `context` tokens.

    Args:
        target: the model.
        runtime: numerics and mesh, the same as the model was loaded with.
        context: tokens that one text may have.
        chunk: tokens per forward pass.
    """

    def __init__(self, target: Target, runtime: Runtime, *, context: int, chunk: int = CHUNK):
        plain = DecodeConfig(mode="autoregressive", budget=0)
        self._decoder = Decoder(target, None, plain, runtime, slots=1, context=context)
        self._chunk = min(chunk, context)
        self._context = context

    def logits(self, tokens: Sequence[int]) -> Float32[np.ndarray, "n vocab"]:
        """Scores of what may follow each of the tokens. Raises KdjaxError where they do not fit into `context`."""
        return self._rows(_logits, np.asarray(tokens, np.int32))

    def log_likelihoods(self, tokens: Sequence[int], following: Sequence[int]) -> Float32[np.ndarray, "n"]:
        """Natural logarithms of the probability of `following[i]` after `tokens[: i + 1]`. Raises like `logits`."""
        return self._rows(_log_likelihoods, np.asarray(tokens, np.int32), np.asarray(following, np.int32))

    def _rows(self, function: Callable[..., Any], *args: Int32[np.ndarray, "n"]) -> np.ndarray:
        n, size = len(args[0]), self._chunk
        if not 0 < n <= self._context:
            raise KdjaxError(f"a text of {n} tokens does not fit into a context of {self._context}: cut it")
        state = self._decoder.empty(-(-self._context // size) * size)
        padded = (np.pad(x, (0, -n % size)).reshape(-1, size) for x in args)
        rows = []
        for chunk in zip(*padded, strict=True):
            state, found = function(self._decoder.program, self._decoder.params, state, *chunk)
            rows.append(np.asarray(found))
        return np.concatenate(rows)[:n]


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def _logits(
    program: loop.Program, params: Params, state: DecodeState, tokens: Int32[Array, "chunk"]
) -> tuple[DecodeState, Float32[Array, "chunk vocab"]]:
    return _read(program, params, state, tokens)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def _log_likelihoods(
    program: loop.Program,
    params: Params,
    state: DecodeState,
    tokens: Int32[Array, "chunk"],
    following: Int32[Array, "chunk"],
) -> tuple[DecodeState, Float32[Array, "chunk"]]:
    state, logits = _read(program, params, state, tokens)
    return state, jnp.take_along_axis(jax.nn.log_softmax(logits), following[:, None], 1)[:, 0]


def _read(
    program: loop.Program, params: Params, state: DecodeState, tokens: Int32[Array, "chunk"]
) -> tuple[DecodeState, Float32[Array, "chunk vocab"]]:
    """The state after one more chunk of the text in its only slot, and the logits of the chunk."""

    def read(
        params: Params, state: DecodeState, tokens: Int32[Array, "chunk"]
    ) -> tuple[DecodeState, Float32[Array, "chunk part"]]:
        model, runtime, before = program.model, program.runtime, state.cache.lengths
        positions = before[:, None] + jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
        out = k2.forward(params.target, model, tokens[None], positions, state.cache, runtime=runtime)
        cache = dataclasses.replace(out.cache, lengths=before + tokens.shape[0])
        logits = k2.logits(params.target, model, out.hidden[0], runtime)
        return dataclasses.replace(state, cache=cache), logits

    vocabulary = PartitionSpec(None, program.vocabulary_axes or None)
    return loop.on_mesh(program, read, params, state, tokens, out_specs=lambda specs: (specs, vocabulary))
