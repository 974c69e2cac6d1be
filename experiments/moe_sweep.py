"""The layer of routed INT4 experts by the number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from experiments import kernels
from kdjax.config.decode import AtLeast1
from kdjax.run import plot
from kdjax.run.experiment import Inputs, Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import Metric
from pallas_kernels import timing
from pallas_kernels.int4_experts import KERNEL_BACKENDS, PackedExperts, bench, int4_experts, tile_experts
from pallas_kernels.int4_experts.bench import Case, Shape
from pallas_kernels.int4_experts.workload import Pattern

CLAIM = (
    "DDTree on a mixture of experts (Qwen3-Coder-30B-A3B in arXiv 2604.12989, table 1): verifying costs what its "
    "experts weigh, so the first nodes are dear and later ones share what is read"
)
METRICS = kernels.METRICS | {
    "experts_used": Metric(total="experts_used", definition="distinct experts per call, mean over the inputs")
}
Backend = Literal["xla", "triton", "interpret"]
GROUP = 32


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tokens` tokens, `top_k` of `experts` experts each; widths are multiples of 128. K2.6: 384, 8, 7168, 2048."""

    tokens: AtLeast1 = 9
    routing: Pattern = "uniform"
    experts: AtLeast1 = 64
    top_k: AtLeast1 = 8
    hidden: AtLeast1 = 512
    inner: AtLeast1 = 256
    backend: Backend = "xla"
    repeats: AtLeast1 = 5


def inputs(config: Config) -> Inputs:
    return Inputs(backend=config.backend)


def measure(config: Config) -> Iterator[Record]:
    case = Case(Shape(config.experts, config.hidden, config.top_k), config.inner, config.tokens, config.routing)
    packed = random_packed(config)
    tiled = tile_experts(packed)
    experts = tiled if config.backend in KERNEL_BACKENDS else packed

    def op(experts: Any, x: jax.Array, indices: jax.Array, weights: jax.Array) -> jax.Array:
        return int4_experts(x, indices, weights, experts, backend=config.backend)

    program = timing.several_calls(op)
    error = bench.error(case.expected(tiled), program((experts,), case.inputs))
    used = float(np.mean([len(np.unique(indices)) for indices in case.routings]))
    for i, timed in enumerate(kernels.timings(program, (experts,), case.inputs, config.repeats)):
        fixed = {"gigabytes": case.needed_bytes / 1e9, "experts_used": used, "error": error}
        yield {"unit": f"repetition {i}", **fixed, "timings": timed}


def random_packed(config: Config) -> PackedExperts:
    """Codes and scales of all sizes in use, in the layout of the checkpoint."""
    rng = np.random.default_rng(3)

    def matrix(rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
        words = rng.integers(0, 2**32, size=(config.experts, rows, columns // 8), dtype=np.uint32)
        scale = rng.uniform(0.005, 0.02, size=(config.experts, rows, columns // GROUP))
        return jnp.asarray(words), jnp.asarray(scale, jnp.bfloat16)

    gate, up = (matrix(config.inner, config.hidden) for _ in range(2))
    return PackedExperts(*gate, *up, *matrix(config.hidden, config.inner), GROUP)


def conclude(results: Sequence[Result]) -> list[str]:
    findings = []
    for name, many in _series(results).items():
        first, last = many[0], many[-1]
        findings.append(
            f"{name}: from {first.config.tokens} to {last.config.tokens} tokens the time grows "
            f"{last.value('us') / first.value('us'):.1f} times, the experts in use "
            f"{last.value('experts_used') / first.value('experts_used'):.1f} times"
        )
        best = max(many, key=lambda r: r.value("of_ceiling"))
        findings.append(
            f"{name}: the experts are read at {best.value('of_ceiling'):.0%} of the read ceiling at best, with "
            f"{best.config.tokens} tokens, and at {first.value('of_ceiling'):.0%} with {first.config.tokens}"
        )
    worst = max(results, key=lambda r: r.value("error"))
    findings.append(f"the largest relative error against float32 is {worst.value('error'):.1e}, at {worst.name}")
    return findings


def draw(results: Sequence[Result], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    for i, (name, many) in enumerate(_series(results).items()):
        tokens = [r.config.tokens for r in many]
        plot.line(left, tokens, [r.estimates["us"] for r in many], i, name)
        plot.line(right, tokens, [r.estimates["of_ceiling"] for r in many], i, name)
    left.set(xlabel="tokens", ylabel="microseconds per layer", yscale="log")
    right.set(xlabel="tokens", ylabel="share of the read ceiling", ylim=(0, None))
    for axes in (left, right):
        plot.log_x(axes, [r.config.tokens for r in results])
    left.legend(fontsize=8)


def _series(results: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda r: r.config.tokens):
        c = result.config
        found.setdefault(f"{c.backend}, {c.experts} experts of width {c.inner}, {c.routing}", []).append(result)
    return found
