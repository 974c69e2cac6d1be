"""Times of one kernel, repetition by repetition, beside the rate at which the device reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from kdjax.run.statistics import Metric
from pallas_kernels import timing

METRICS = {
    "us": Metric(total="us", definition="microseconds per call, launches amortised over several calls"),
    "gb_s": Metric(
        total="gigabytes", per="seconds", definition="GB/s at which what has to be read once is read, in 10^9 bytes"
    ),
    "of_ceiling": Metric(
        total="gigabytes", per="readable", definition="the same over what this device reads in a plain maximum"
    ),
    "error": Metric(total="error", definition="largest relative norm of the difference from float32"),
}
CPU_BYTES = 2**25


def timings(
    program: Callable[..., Any], shared: Sequence[Any], inputs: Sequence[Sequence[Any]], repeats: int
) -> Iterator[dict[str, float]]:
    """The `timings` of a record, for each repetition. `readable`: 10^9 bytes that could be read meanwhile."""
    on_cpu = jax.default_backend() == "cpu"
    ceiling = timing.read_ceiling(CPU_BYTES) if on_cpu else timing.read_ceiling()
    min_ops = len(inputs) if on_cpu else 96
    for _ in range(repeats):
        us = timing.measure(program, shared, inputs, repetitions=1, min_ops=min_ops).min_us
        yield {"us": us, "seconds": us * 1e-6, "readable": ceiling * us * 1e-6}
