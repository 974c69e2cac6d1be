"""Attention of a draft tree over a cached prefix, by nodes, streams and length of the prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from experiments import kernels
from experiments.moe_sweep import Backend
from kdjax.config.decode import AtLeast1
from kdjax.run import plot
from kdjax.run.experiment import Inputs, Result
from kdjax.run.ledger import Record
from pallas_kernels.tree_attention import bench
from pallas_kernels.tree_attention.cases import Case, random_data

CLAIM = (
    "CaDDTree (arXiv 2606.01813), cost of verifying by nodes and context: flat in the nodes while the prefix is read, "
    "steeper the longer it is"
)
METRICS = kernels.METRICS


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`streams` trees of `tokens` rows over `prefix` cached rows each; `heads` are those of one device.

    Rows have the widths of K2.6. At most `copies` caches take turns, so that L2 does not hold them.
    """

    tokens: AtLeast1 = 8
    streams: AtLeast1 = 1
    prefix: AtLeast1 = 1024
    heads: AtLeast1 = 8
    backend: Backend = "xla"
    copies: AtLeast1 = 4
    repeats: AtLeast1 = 5
    seed: int = 0


def inputs(config: Config) -> Inputs:
    return Inputs(backend=config.backend)


def measure(config: Config) -> Iterator[Record]:
    case = Case(config.heads, config.tokens, config.streams, config.prefix)
    data = random_data(case, config.seed)
    program, shared, inputs = bench.ours(case, data, None, config.backend, most_inputs=config.copies)
    error = bench.error(data, program(shared, inputs)[-1], copy=len(inputs) - 1)
    for i, timed in enumerate(kernels.timings(program, shared, inputs, config.repeats)):
        yield {"unit": f"repetition {i}", "gigabytes": case.cache_bytes / 1e9, "error": error, "timings": timed}


def conclude(results: Sequence[Result]) -> list[str]:
    findings = []
    for (streams, prefix), many in _series(results).items():
        if len(many) > 1:
            first, last = many[0], many[-1]
            findings.append(
                f"{streams} stream(s) over {prefix:,} rows: {last.config.tokens} tree rows take "
                f"{last.value('us') / first.value('us'):.2f} times as long as {first.config.tokens}"
            )
    best = max(results, key=lambda r: r.value("of_ceiling"))
    findings.append(f"the cache is read at {best.value('of_ceiling'):.0%} of the read ceiling at best, at {best.name}")
    worst = max(results, key=lambda r: r.value("error"))
    findings.append(f"the largest relative error against float32 is {worst.value('error'):.1e}, at {worst.name}")
    return findings


def draw(results: Sequence[Result], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    for i, ((streams, prefix), many) in enumerate(_series(results).items()):
        tokens, label = [r.config.tokens for r in many], f"C={streams}, prefix {prefix:,}"
        plot.line(left, tokens, [r.estimates["us"] for r in many], i, label)
        plot.line(right, tokens, [r.estimates["of_ceiling"] for r in many], i, label)
    for axes in (left, right):
        plot.log_x(axes, [r.config.tokens for r in results])
        axes.set_xlabel("tree rows")
    left.set(ylabel="microseconds per layer", yscale="log")
    right.set(ylabel="share of the read ceiling", ylim=(0, None))
    left.legend(fontsize=8)


def _series(results: Sequence[Result]) -> dict[tuple[int, int], list[Result]]:
    found: dict[tuple[int, int], list[Result]] = {}
    for result in sorted(results, key=lambda r: r.config.tokens):
        found.setdefault((result.config.streams, result.config.prefix), []).append(result)
    return dict(sorted(found.items()))
