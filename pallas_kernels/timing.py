"""Times of whole ops on one device, the read ceiling to judge them by, and result files that grow row by row."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per call of an op, over the repetitions of one measurement."""

    median_us: float
    min_us: float


LOOPS_ON_GPU = 8
"""A command buffer replays as it is only where the addresses of its buffers stay: from one iteration of a loop to the
next, but not from one launch of a program to the next, when the host first writes every kernel of it anew."""


def loops_here() -> int:
    """How often a program of `several_calls` does its inputs on this device."""
    return LOOPS_ON_GPU if jax.default_backend() == "gpu" else 1


MIN_MS_ON_GPU = 20.0
"""Starting an idle GPU and waiting for its end take 0.3 to 0.4 ms: in 96 calls, 3 of the 20 us of a short one."""


def several_calls(op: Callable[..., Any], loops: int | None = None) -> jax.stages.Wrapped:
    """`f(shared, inputs)`: op(*shared, *one) for each of `inputs`, in one compiled program, `loops` times over.

    Many calls with inputs of their own amortise the launch of the program, replay as one command buffer, and keep
    weights that differ between the inputs from staying in the L2 cache. `loops` is `loops_here()` where it is None.
    """
    one_call = jax.jit(op)  # traced and lowered once, however many inputs there are

    def each(shared: Sequence[Any], inputs: Sequence[Sequence[Any]]) -> list[Any]:
        return [one_call(*shared, *one) for one in inputs]

    @jax.jit
    def f(shared: Sequence[Any], inputs: Sequence[Sequence[Any]]) -> list[Any]:
        times = loops_here() if loops is None else loops
        if times == 1:
            return each(shared, inputs)

        def body(_: Any, carry: tuple[jax.Array, list[Any]]) -> tuple[jax.Array, list[Any]]:
            # arguments that seem to depend on the iteration: XLA moves what does not out of the loop
            token, *arguments = lax.optimization_barrier((carry[0], shared, inputs))
            return token, each(*arguments)

        outs = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), jax.eval_shape(each, shared, inputs))
        return lax.fori_loop(0, times, body, (jnp.zeros((), jnp.int32), outs))[1]

    return f


def measure(
    program: Callable[..., Any],
    shared: Sequence[Any],
    inputs: Sequence[Sequence[Any]],
    *,
    repetitions: int = 12,
    min_ops: int = 96,
    min_ms: float | None = None,
    loops: int | None = None,
) -> Timing:
    """Time of one op within `program`, which is `several_calls(op, loops)`, compiled or not.

    A repetition runs the program until at least `min_ops` ops are done, for about `min_ms` (None: 20 on a GPU, else 0),
    and waits once, at its end.
    """
    jax.block_until_ready(program(shared, inputs))
    ops = len(inputs) * (loops_here() if loops is None else loops)
    if min_ms is None:
        min_ms = MIN_MS_ON_GPU if jax.default_backend() == "gpu" else 0.0
    start = time.perf_counter()
    jax.block_until_ready(program(shared, inputs))
    once = time.perf_counter() - start
    launches = max(-(-min_ops // ops), math.ceil(min_ms / 1e3 / once))
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        for _ in range(launches):
            out = program(shared, inputs)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / (launches * ops))
    return Timing(statistics.median(times) * 1e6, min(times) * 1e6)


def compile_all(jobs: Sequence[Callable[[], Any]], *, threads: int) -> list[Any | Exception]:
    """The result of every job, or its exception.

    All at once and before anything is measured: threads that trace hold up the launches of the one that measures.
    """
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(job) for job in jobs]
    return [f.exception() or f.result() for f in futures]


def time_op(op: Callable[..., Any], shared: Sequence[Any], inputs: Sequence[Sequence[Any]], **options: Any) -> Timing:
    """Compile and `measure` op(*shared, *one) over `inputs`, a sequence of argument tuples."""
    return measure(several_calls(op), shared, inputs, **options)


@functools.cache
def read_ceiling(n_bytes: int = 2**31) -> float:
    """GB/s at which this device reads: the best of several maxima over `n_bytes` of int16, a multiple of 2 MiB."""
    words = jax.jit(lambda: jax.random.bits(jax.random.key(1), (n_bytes // 2,), jnp.uint16).view(jnp.int16))()
    timing = time_op(lambda a: jnp.max(a.reshape(-1, 2**20), axis=1), (), [(words,)], repetitions=8, min_ops=2)
    return n_bytes / timing.min_us / 1e3


@functools.cache
def matmul_peak(n: int = 8192) -> float:
    """TFLOP/s of a square bf16 matmul of size `n`."""
    keys = jax.random.split(jax.random.key(2))
    a, b = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in keys)
    timing = time_op(jnp.matmul, (), [(a, b)], repetitions=8, min_ops=4)
    return 2 * n**3 / timing.min_us / 1e6


def device_facts() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    device = jax.devices()[0]
    version = getattr(device.client, "platform_version", "").splitlines()
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "platform_version": version[0] if version else "",
        "jax": jax.__version__,
    }


def write_rows(path: str | Path, rows: Sequence[dict[str, Any]], **header: Any) -> None:
    """`{**header, "rows": rows}` as JSON, one line per row. Write after every row: a cut run then keeps its rows."""
    head = json.dumps(header, indent=1)[:-2] + "," if header else "{"
    body = ",\n".join("  " + json.dumps(row) for row in rows)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(target.suffix + ".part")
    try:
        part.write_text(f'{head}\n "rows": [\n{body}\n ]\n}}\n', encoding="utf-8")
    except OSError as error:
        error.filename = str(target)  # a full disk's error names none
        raise
    part.replace(target)
