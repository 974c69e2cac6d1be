"""The host's side of decoding: requests into slots, calls of rounds, committed tokens out."""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from kdjax.decode import loop, slots
from kdjax.decode.completion import Commit, Completion, FinishReason, Statistics, Timings
from kdjax.decode.programs import Compiled, Programs
from kdjax.decode.request import Request
from kdjax.decode.state import DecodeState, Reason
from kdjax.errors import KdjaxError

T = TypeVar("T")

_FIRST_ROUNDS = 2
"""Rounds of a stream's first call, so that text appears early."""

_FINISH: dict[int, FinishReason] = {Reason.STOP: "stop", Reason.LENGTH: "length"}


class Failure(NamedTuple):
    """A request that ended with an error; the others go on."""

    request: int
    error: KdjaxError


class PromptTokens(NamedTuple):
    """Prompt tokens that went through the target, and those whose rows were there already."""

    read: int = 0
    shared: int = 0


class _Place(NamedTuple):
    """The slot for a request; slot `source` holds the rows of its first `shared` tokens."""

    slot: int
    source: int
    shared: int


@dataclasses.dataclass
class _Live:
    """A request in its slot."""

    index: int
    request: Request
    prefill: float = 0.0
    decode: float = 0.0
    sent: int = 0


class Batch:
    """Requests that share the slots of one state, and those that wait for one. For one thread at a time.

    Waiting requests are taken by priority, largest first, then in the order they were added; what runs is never put
    back. Requests are told apart by an index of the caller's and must have been checked.

    Args:
        programs: what to run; its `params` may be replaced between steps.
        capacity: token rows per slot, at least the longest prompt and its new tokens.
        share_prefixes: a prompt starts with the rows that another slot has of its prefix. Whole chunks are shared, read
            at the same positions as without sharing: the tokens are the same.
    """

    def __init__(self, programs: Programs, capacity: int, *, share_prefixes: bool = False):
        self.prompt_tokens = PromptTokens()
        self._programs, self._capacity, self._share = programs, capacity, share_prefixes
        self._compile_seconds = 0.0
        self._edits: dict[Callable[..., DecodeState], jax.stages.Compiled] = {}
        self._waiting: list[tuple[int, int, Request]] = []
        self._live: dict[int, _Live] = {}
        self._read: list[np.ndarray] = []
        self._spoiled: set[int] = set()
        self._oldest = list(range(programs.slots))
        self._state: DecodeState | None = None
        self._ahead: loop.Report | None = None
        self._first = min(_FIRST_ROUNDS, programs.config.rounds_per_call)
        self._rounds = self._first
        self._ready = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._live)

    def add(self, index: int, request: Request, priority: int = 0) -> None:
        heapq.heappush(self._waiting, (-priority, index, request))

    def remove(self, index: int) -> None:
        """Forget a request, waiting or running; its slot is free at once. Nothing happens where it is not here."""
        self._waiting = [entry for entry in self._waiting if entry[1] != index]
        heapq.heapify(self._waiting)
        for slot in [slot for slot, one in self._live.items() if one.index == index]:
            del self._live[slot]
            self._edit(slots.release, np.int32(slot))

    def drop_running(self) -> list[int]:
        """Forget what runs, and the state with it, after a call that failed; what waits stays. Returns the indices."""
        lost = [one.index for one in self._live.values()]
        self._live, self._state, self._ahead = {}, None, None
        return lost

    def step(self) -> list[Commit | Failure]:
        """One unit of work: a prompt read into a free slot, or one call of rounds."""
        if not self._live:
            self._ahead = None
        # A report that is on its way is of the slots as they were: it is read before one of them changes hands.
        if self._waiting and self._ahead is None and len(self._live) < self._programs.slots:
            return self._admit()
        return self._advance() if self._live else []

    def _admit(self) -> list[Commit | Failure]:
        compiled = self._compiled()
        self._waited(lambda: compiled.prefill)
        _, index, request = heapq.heappop(self._waiting)
        prompt = np.asarray(request.prompt_ids, np.int32)
        place = self._place(prompt)
        # In its slot before anything can fail: `drop_running` names it.
        one = self._live[place.slot] = _Live(index, request)
        self._read[place.slot] = prompt[:0]
        began, compiling = time.perf_counter(), self._compile_seconds
        if place.slot in self._spoiled:  # not earlier: rounds of the others write scratch rows here too
            self._edit(slots.wipe, np.int32(place.slot))
            self._spoiled.remove(place.slot)
        if place.shared and place.source != place.slot:
            self._edit(slots.copy_rows, np.int32(place.source), np.int32(place.slot))
        self._state, report = self._programs.prefill(compiled, self._ready_state(), place.slot, request, place.shared)
        report = jax.device_get(report)
        one.prefill = time.perf_counter() - began - (self._compile_seconds - compiling)
        self._read[place.slot] = prompt
        read, shared = self.prompt_tokens
        self.prompt_tokens = PromptTokens(read + len(prompt) - place.shared, shared + place.shared)
        self._rounds = self._first
        return [self._collect(place.slot, report)]

    def _advance(self) -> list[Commit | Failure]:
        compiled = self._compiled()
        if self._ahead is None:
            self._waited(lambda: compiled.decode)
            self._ready = time.perf_counter()
        report = self._launch() if self._ahead is None else self._ahead
        self._rounds = self._programs.config.rounds_per_call
        # The next call runs while the host reads and prints this one; with requests waiting it must not be in the way
        # of a refill.
        self._ahead = None if self._waiting else self._launch()
        report = jax.device_get(report)
        # From the end of the call before: the device was busy meanwhile, whatever the host did.
        elapsed, self._ready = time.perf_counter() - self._ready, time.perf_counter()
        events = []
        for slot, one in list(self._live.items()):
            one.decode += elapsed
            event = self._collect(slot, report)
            if isinstance(event, Failure) or event.token_ids or event.finish_reason:
                events.append(event)
        return events

    def _launch(self) -> loop.Report:
        running = np.int32(len(self._live) if self._waiting else 1)
        decode = self._compiled().decode
        self._state, report = decode(self._programs.params, self._ready_state(), np.int32(self._rounds), running)
        return report

    def _collect(self, slot: int, report: loop.Report) -> Commit | Failure:
        """The slot's new tokens; frees the slot if they are its last."""
        one = self._live[slot]
        emitted, reason = int(report.emitted[slot]), int(report.reason[slot])
        if reason == Reason.NOT_FINITE:
            del self._live[slot]
            self._spoiled.add(slot)
            self._read[slot] = self._read[slot][:0]
            position = len(one.request.prompt_ids) + emitted - 1
            message = (
                f"request {one.index}: the logits at position {position} have no finite maximum (NaN or all -inf): "
                "check the checkpoint's weights and the compute dtype"
            )
            return Failure(one.index, KdjaxError(message))
        fresh = tuple(int(t) for t in report.output[slot, one.sent : emitted])
        one.sent = emitted
        finish = _FINISH.get(reason)
        if finish is not None:
            del self._live[slot]
        so_far = Completion(
            tuple(int(t) for t in report.output[slot, :emitted]),
            finish,
            Statistics(
                int(report.rounds[slot]),
                emitted - 1,
                tuple(int(n) for n in report.accepted_by_depth[slot, : self._programs.program.depth]),
            ),
            Timings(one.prefill, self._compile_seconds, one.decode),
        )
        return Commit(slot, one.index, fresh, so_far)

    def _place(self, prompt: np.ndarray) -> _Place:
        """A free slot: the one that has most of the prompt, else the one that was taken longest ago."""
        shared = [self._common(read, prompt) if self._share else 0 for read in self._read]
        source = max(range(len(shared)), key=lambda slot: (shared[slot], slot not in self._live))
        free = [slot for slot in self._oldest if slot not in self._live]
        slot = source if shared[source] and source in free else free[0]
        self._oldest.remove(slot)
        self._oldest.append(slot)
        return _Place(slot, source, shared[source])

    def _common(self, read: np.ndarray, prompt: np.ndarray) -> int:
        """Whole chunks that both start with; the last token of the prompt is always read, for its logits."""
        n = min(len(read), len(prompt) - 1)
        differ = np.flatnonzero(read[:n] != prompt[:n])
        same = int(differ[0]) if len(differ) else n
        return same // self._programs.chunk * self._programs.chunk

    def _ready_state(self) -> DecodeState:
        if self._state is None:
            self._state = self._programs.empty(self._capacity)
            self._read = [np.zeros(0, np.int32)] * self._programs.slots
            self._spoiled.clear()
        return self._state

    def _compiled(self) -> Compiled:
        return self._waited(lambda: self._programs.compiled(self._capacity, self._ready_state()))

    def _edit(self, change: Callable[..., DecodeState], *at: np.int32) -> None:
        if change not in self._edits:
            self._edits[change] = self._waited(lambda: self._programs.edit(change, self._ready_state(), *at))
        self._state = self._edits[change](self._ready_state(), *at)

    def _waited(self, compiling: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = compiling()
        self._compile_seconds += time.perf_counter() - began
        return result
