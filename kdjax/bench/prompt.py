"""Time to the first token of a prompt, chunk by chunk as `kdjax.decode` reads it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdjax.bench.step import host_exchanges
from kdjax.bench.subject import Subject
from kdjax.decode import loop
from kdjax.decode.request import MAX_STOP_TOKENS
from kdjax.errors import KdjaxError
from kdjax.plan.memory import Workload


def measure(
    subject: Subject, prompts: Sequence[int], chunk: int, budget: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """A row per prompt length, shortest first, of one stream whose cache has room for the longest.

    A chunk is what the other streams wait for while a prompt is read, so each is timed by itself, and waited for.
    Drafter rows are written along. Times are milliseconds but for `compile_seconds`, which includes tracing. No prompt
    is begun after `deadline`, on the clock of `time.monotonic`.

    Raises:
        KdjaxError: the program would talk to the host, or something does not fit.
    """
    params = subject.params()
    workload = Workload(max(prompts), 1, budget)
    program, state = subject.program(budget), subject.state(workload)
    admission = loop.Admission(
        jnp.int32(2**30), jnp.int32(budget), jnp.uint32(0), jnp.full(MAX_STOP_TOKENS, -1, jnp.int32)
    )
    slot, admission = subject.on_devices((jnp.int32(0), admission))

    def arguments(tokens: np.ndarray, start: int, last: bool) -> tuple[Any, ...]:
        padded = np.pad(tokens, (0, chunk - len(tokens))).astype(np.int32)
        placed = subject.on_devices((jnp.asarray(padded), jnp.int32(start), jnp.int32(len(tokens)), jnp.bool_(last)))
        return (*placed, admission)

    began = time.perf_counter()
    text = np.random.default_rng(0).integers(0, subject.pair.target.vocab_size, max(prompts))
    compiled = loop.prefill.lower(program, params, state, slot, *arguments(text[:1], 0, True)).compile()
    compile_seconds = round(time.perf_counter() - began, 1)
    if found := host_exchanges(compiled.as_text() or ""):
        raise KdjaxError(f"the compiled prefill talks to the host ({', '.join(found)}): no chunk may")
    state, _ = compiled(params, state, slot, *arguments(text[:chunk], 0, False))  # its first call loads it
    jax.block_until_ready(state)
    for length in sorted(prompts):
        if time.monotonic() > deadline:
            return
        times = []
        for start in range(0, length, chunk):
            piece = text[start : min(start + chunk, length)]
            began = time.perf_counter()
            state, report = compiled(params, state, slot, *arguments(piece, start, start + chunk >= length))
            int(report.emitted[0])
            times.append((time.perf_counter() - began) * 1e3)
        if int(report.emitted[0]) != 1:
            raise KdjaxError(f"a prompt of {length} tokens emitted no first token: use weights that stay finite")
        yield {
            "prompt": length,
            "chunk": chunk,
            "time_to_first_token_ms": round(sum(times), 2),
            "first_chunk_ms": round(times[0], 3),
            "longest_chunk_ms": round(max(times), 3),
            "tokens_per_s": round(length / sum(times) * 1e3, 1),
            "compile_seconds": compile_seconds,
        }
