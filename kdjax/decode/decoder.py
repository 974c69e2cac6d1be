"""The host side: requests into slots, compiled programs, committed tokens out."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from kdjax.checkpoint import Drafter, Target
from kdjax.config import DecodeConfig, check_pair
from kdjax.decode import loop
from kdjax.decode.budgeting import CostAware
from kdjax.decode.completion import Commit, Completion, FinishReason, Statistics, Timings
from kdjax.decode.drafting import DFlash, Drafting, Params
from kdjax.decode.request import MAX_STOP_TOKENS, Request, check_request
from kdjax.decode.state import DecodeState, Reason
from kdjax.errors import KdjaxError
from kdjax.model.runtime import Runtime
from kdjax.sharding import make_mesh, place, shardings
from kdjax.tree import candidates

_FIRST_ROUNDS = 2
"""Rounds of a stream's first call, so that text appears early."""

_FINISH: dict[int, FinishReason] = {Reason.STOP: "stop", Reason.LENGTH: "length"}


@dataclasses.dataclass
class _Live:
    """A request in its slot."""

    index: int
    request: Request
    prefill: float
    decode: float = 0.0
    sent: int = 0


class _Compiled:
    """Programs of one capacity, compiled side by side: the first prompt does not wait for the decode program."""

    def __init__(self, prefill: jax.stages.Lowered, decode: jax.stages.Lowered):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            self._prefill = pool.submit(prefill.compile)
            self._decode = pool.submit(decode.compile)
            pool.shutdown(wait=False)

    @property
    def prefill(self) -> jax.stages.Compiled:
        return self._prefill.result()

    @property
    def decode(self) -> jax.stages.Compiled:
        return self._decode.result()


class Decoder:
    """Decodes requests over `slots` streams with one compiled program per capacity.

    Args:
        target: the loaded target model.
        drafter: the loaded drafter; None where `config` drafts nothing or `drafting` is given.
        config: how to decode.
        runtime: numerics, the same as the models were loaded with.
        slots: streams that run at once.
        context: most tokens (prompt and new) per stream; default is the target's max_position_embeddings.
        drafting: another drafter for the loop than DFlash.
        mesh: the devices of `runtime.mesh`; default is `kdjax.sharding.make_mesh` of it. Params that do not lie there
            yet are put there.
        policy: how many of the drafted nodes each round verifies; default is all of them.

    `params` may be replaced by weights of the same shapes and types; nothing is compiled again.

    Raises:
        KdjaxError: the drafter does not fit the target, is missing, or the budget is too large; or the mesh does not
            fit the model or the machine.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: DecodeConfig,
        runtime: Runtime,
        *,
        slots: int = 1,
        context: int | None = None,
        drafting: Drafting | None = None,
        mesh: Mesh | None = None,
        policy: CostAware | None = None,
    ):
        if slots < 1:
            raise KdjaxError(f"slots={slots} must be at least 1")
        limit = target.config.max_position_embeddings
        if context is not None and not 0 < context <= limit:
            raise KdjaxError(f"context={context} must lie in 1 to the model's max_position_embeddings={limit}")
        if drafter is not None:
            check_pair(target.config, drafter.config, allow_mismatch=drafter.mismatch_allowed)
            if drafting is None:
                drafting = DFlash(drafter.config, target.config, runtime)
        budget = 0 if config.mode == "autoregressive" else config.budget
        if budget and drafting is None:
            raise KdjaxError(f"mode={config.mode} with budget={budget} needs a drafter: give one or use autoregressive")
        if drafting is not None and config.mode == "chain":
            budget = min(budget, drafting.depth)
        if budget and drafting is not None and config.mode == "tree":
            candidates(drafting.depth, budget, min(budget, target.config.vocab_size))  # refuses what is too large
        if policy is not None and (config.mode != "tree" or policy.widths[-1] != budget):
            raise KdjaxError(
                f"the policy's widths end with {policy.widths[-1]}, mode={config.mode} has budget={budget}: use mode "
                "tree and the last width as its budget"
            )
        self.config, self.slots = config, slots
        self.context = limit if context is None else context
        self.chunk = min(config.prefill_chunk, self.context)
        if mesh is None and runtime.mesh.devices > 1:
            mesh = make_mesh(runtime.mesh)
        self.program = loop.Program(
            target.config, runtime, config.mode, budget, config.sampling, drafting if budget else None, mesh, policy
        )
        self.params = self.place(Params(target.params, drafter.params if drafter is not None and budget else None))
        self._compiled: dict[int, _Compiled] = {}

    def place(self, params: Params) -> Params:
        """`params` on the mesh, split as its program takes them; as they are on one device."""
        if self.program.mesh is None:
            return params
        return place(params, shardings(self.program.param_specs(params), self.program.mesh))

    def stream(self, requests: Sequence[Request]) -> Iterator[Commit]:
        """Committed tokens as they come. A free slot takes the next waiting request.

        All requests are checked before any runs.

        Raises:
            KdjaxError: a request cannot run, or the model's logits are not finite.
        """
        for index, request in enumerate(requests):
            check_request(request, index, self.program.model, self.context, self.config.budget)
        return self._stream(requests)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests; see `stream`."""
        done = {commit.request: commit.so_far for commit in self.stream(requests)}
        return [done[index] for index in range(len(requests))]

    def _stream(self, requests: Sequence[Request]) -> Iterator[Commit]:
        if not requests:
            return
        capacity = self._capacity(max(len(r.prompt_ids) + r.max_new_tokens for r in requests))
        state = self._empty(capacity)
        began = time.perf_counter()
        compiled = self._compile(capacity, state)
        _ = compiled.prefill
        compile_seconds = time.perf_counter() - began
        waiting = collections.deque(enumerate(requests))
        live: dict[int, _Live] = {}
        ahead: loop.Report | None = None
        rounds = _FIRST_ROUNDS
        ready = 0.0

        def launch() -> loop.Report:
            nonlocal state
            running = np.int32(len(live) if waiting else 1)
            state, report = compiled.decode(self.params, state, np.int32(rounds), running)
            return report

        while waiting or live:
            for slot in range(self.slots):
                while waiting and slot not in live:
                    index, request = waiting.popleft()
                    began = time.perf_counter()
                    state, report = self._prefill(compiled, state, slot, request)
                    report = jax.device_get(report)
                    live[slot] = _Live(index, request, time.perf_counter() - began)
                    rounds = _FIRST_ROUNDS
                    yield self._collect(live, slot, report, compile_seconds)
            if not live:
                continue
            if ahead is None:
                began = time.perf_counter()
                _ = compiled.decode
                ready = time.perf_counter()
                compile_seconds += ready - began
            report = launch() if ahead is None else ahead
            rounds = self.config.rounds_per_call
            # The next call runs while the host reads and prints this one; with requests waiting it must not be in the
            # way of a refill.
            ahead = None if waiting else launch()
            report = jax.device_get(report)
            # From the end of the call before: the device was busy meanwhile, whatever the host did.
            elapsed, ready = time.perf_counter() - ready, time.perf_counter()
            for slot in list(live):
                live[slot].decode += elapsed
                commit = self._collect(live, slot, report, compile_seconds)
                if commit.token_ids or commit.finish_reason:
                    yield commit

    def _collect(self, live: dict[int, _Live], slot: int, report: loop.Report, compile_seconds: float) -> Commit:
        """The slot's new tokens; frees the slot if they are its last."""
        one = live[slot]
        emitted, reason = int(report.emitted[slot]), int(report.reason[slot])
        if reason == Reason.NOT_FINITE:
            position = len(one.request.prompt_ids) + emitted - 1
            raise KdjaxError(
                f"request {one.index}: the logits at position {position} have no finite maximum (NaN or all -inf): "
                "check the checkpoint's weights and the compute dtype"
            )
        fresh = tuple(int(t) for t in report.output[slot, one.sent : emitted])
        one.sent = emitted
        finish = _FINISH.get(reason)
        if finish is not None:
            del live[slot]
        so_far = Completion(
            tuple(int(t) for t in report.output[slot, :emitted]),
            finish,
            Statistics(
                int(report.rounds[slot]),
                emitted - 1,
                tuple(int(n) for n in report.accepted_by_depth[slot, : self.program.depth]),
            ),
            Timings(one.prefill, compile_seconds, one.decode),
        )
        return Commit(slot, one.index, fresh, so_far)

    def _capacity(self, needed: int) -> int:
        """Token rows per slot: powers of two from 64, so that few programs are compiled, within the context."""
        power = 64
        while power < needed:
            power *= 2
        return min(power, -(-self.context // 64) * 64)

    def _empty(self, capacity: int) -> DecodeState:
        make = functools.partial(self.program.empty_state, self.slots, capacity)
        if self.program.mesh is None:
            return make()
        specs = self.program.state_specs(jax.eval_shape(make))
        return jax.jit(make, out_shardings=shardings(specs, self.program.mesh))()

    def _compile(self, capacity: int, state: DecodeState) -> _Compiled:
        if capacity not in self._compiled:
            scalar = np.int32(0)
            chunk = np.zeros(self.chunk, np.int32)
            admission = loop.Admission(scalar, scalar, np.uint32(0), np.zeros(MAX_STOP_TOKENS, np.int32))
            self._compiled[capacity] = _Compiled(
                loop.prefill.lower(
                    self.program, self.params, state, scalar, chunk, scalar, scalar, np.bool_(True), admission
                ),
                loop.decode.lower(self.program, self.params, state, scalar, scalar),
            )
        return self._compiled[capacity]

    def _prefill(
        self, compiled: _Compiled, state: DecodeState, slot: int, request: Request
    ) -> tuple[DecodeState, loop.Report]:
        admission = admit(request, self.program.budget)
        size, prompt = self.chunk, np.asarray(request.prompt_ids, np.int32)
        report = None
        for start in range(0, len(prompt), size):
            piece = prompt[start : start + size]
            chunk = np.zeros(size, np.int32)
            chunk[: len(piece)] = piece
            state, report = compiled.prefill(
                self.params,
                state,
                np.int32(slot),
                chunk,
                np.int32(start),
                np.int32(len(piece)),
                np.bool_(start + size >= len(prompt)),
                admission,
            )
        assert report is not None  # the prompt is not empty
        return state, report


def admit(request: Request, budget: int) -> loop.Admission:
    """What a slot keeps of a request; `budget` is the compiled one."""
    stop = np.full(MAX_STOP_TOKENS, -1, np.int32)
    stops = sorted(set(request.stop_token_ids))
    stop[: len(stops)] = stops
    budget = budget if request.budget is None else min(request.budget, budget)
    return loop.Admission(np.int32(request.max_new_tokens), np.int32(budget), np.uint32(request.seed), stop)
