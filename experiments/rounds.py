"""Decoding one round at a time, to see the trees, what was accepted of them, and the experts in use."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from kdjax.decode import Decoder, Request, loop
from kdjax.decode.programs import admit
from kdjax.decode.request import check_request
from kdjax.decode.state import DecodeState, Reason


class Seen(NamedTuple):
    """One round on the host, of the slots that ran. Arrays are [streams, rows] or as said.

    `routing` is [MoE layers, streams, rows, top_k]. Rows from `n_valid[s]` on are padding.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    scores: np.ndarray
    n_valid: np.ndarray
    """[streams]"""
    on_path: np.ndarray
    """Rows that were accepted, the root among them."""
    routing: np.ndarray


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def _step(program: loop.Program, params: loop.Params, state: DecodeState) -> tuple[DecodeState, loop.Round]:
    return loop.observed_round(program, params, state)


def observe(decoder: Decoder, requests: Sequence[Request]) -> Iterator[tuple[np.ndarray, Seen]]:
    """Rounds of the requests, one in each slot, until all have ended: (indices of those that ran, what was seen).

    Raises KdjaxError where a request cannot run.
    """
    program, params = decoder.program, decoder.params
    for index, request in enumerate(requests):
        check_request(request, index, program.model, decoder.context, program.budget)
    state = program.empty_state(decoder.slots, decoder.context)
    width = -(-max(len(r.prompt_ids) for r in requests) // 64) * 64
    for slot, request in enumerate(requests):
        prompt = np.zeros(width, np.int32)
        prompt[: len(request.prompt_ids)] = request.prompt_ids
        length = np.int32(len(request.prompt_ids))
        place = (np.int32(slot), prompt, np.int32(0), length, np.bool_(True))
        state, _ = loop.prefill(program, params, state, *place, admit(request, program.budget))
    while (running := np.flatnonzero(np.asarray(state.reason) == Reason.RUNNING)).size:
        state, done = _step(program, params, state)
        yield running, _seen(done, running)


def _seen(done: loop.Round, running: np.ndarray) -> Seen:
    tree, rows = done.tree, np.asarray(done.accepted.rows)
    used = np.arange(rows.shape[1])[None, :] < np.asarray(done.accepted.n_accepted)[:, None]
    on_path = np.zeros(tree.tokens.shape, bool)
    np.put_along_axis(on_path, np.where(used, rows, 0), True, axis=1)

    def ran(array: jax.Array | np.ndarray) -> np.ndarray:
        return np.asarray(array)[running]

    return Seen(
        ran(tree.tokens),
        ran(tree.parents),
        ran(tree.depths),
        ran(tree.scores),
        ran(tree.n_valid),
        ran(on_path),
        np.stack([ran(layer) for layer in done.routing]),
    )


def batches(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Groups of `size` that run at once; what is left over at the end is left out."""
    return [list(requests[i : i + size]) for i in range(0, len(requests) - size + 1, size)]
