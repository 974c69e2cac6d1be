"""Time of the whole layer of routed experts, K2.6 shapes: python -m pallas_kernels.int4_experts.bench --out FILE

A row per (expert width, tokens, routing pattern): microseconds, the bytes the experts in use have, the fraction of the
read ceiling measured in the same run that these bytes per time are, the fraction of the bf16 matmul peak likewise, and
the time of Marlin (vLLM 0.23, H200).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import timing
from pallas_kernels.device import device_kind
from pallas_kernels.int4_experts import KERNELS, int4_experts
from pallas_kernels.int4_experts.config import Config, Rings, choose, device_table, to_json
from pallas_kernels.int4_experts.layout import TiledExperts
from pallas_kernels.int4_experts.study import Study
from pallas_kernels.int4_experts.workload import Pattern, dense_expert, needed_bytes, random_experts, routing

EXPERTS, HIDDEN, TOP_K = 384, 7168, 8
WIDTHS = (256, 2048)
INPUTS = (4, 8, 16)  # per program: the fewer, the more weights each reads
TOKENS = (1, 2, 4, 9, 17, 33, 64, 90, 128, 330, 512, 1024, 4096)

# vLLM 0.23, read ceiling of the same GPU as measured here: whole layer, CUDA graph, uniform routing; microseconds
MARLIN_DEVICE, MARLIN_CEILING_GB_S = "NVIDIA H200", 3730
MARLIN_US = {
    256: {
        1: 34.6,
        2: 44.2,
        4: 62.3,
        9: 100,
        17: 159,
        33: 241,
        64: 354,
        90: 408,
        128: 443,
        330: 580,
        512: 558,
        1024: 849,
    },
    2048: {
        1: 85.0,
        2: 140,
        4: 253,
        9: 515,
        17: 904,
        33: 1556,
        64: 2236,
        90: 2707,
        128: 2805,
        330: 3782,
        512: 3580,
        1024: 4850,
    },
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a benchmark needs of a layer; other than K2.6's only to try the benchmark itself."""

    experts: int = EXPERTS
    hidden: int = HIDDEN
    top_k: int = TOP_K


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer and inputs of `tokens` tokens, as many as it takes for the weights not to stay in the L2 cache."""

    shape: Shape
    inner: int
    tokens: int
    pattern: Pattern = "uniform"

    @functools.cached_property
    def routings(self) -> list[np.ndarray]:
        s = self.shape
        rng = np.random.default_rng([self.tokens, self.inner])
        share = min(1.0, self.tokens * s.top_k / s.experts)
        count = INPUTS[0 if share > 0.3 else 1 if share > 0.05 or self.inner > 512 else 2]
        return [routing(rng, self.tokens, s.experts, s.top_k, self.pattern) for _ in range(count)]

    @functools.cached_property
    def inputs(self) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        x_key, w_key = jax.random.split(jax.random.key(self.tokens))
        x = jax.random.normal(x_key, (self.tokens, self.shape.hidden), jnp.bfloat16)
        weights = jax.random.uniform(w_key, (self.tokens, self.shape.top_k), minval=0.1)
        return [(x, jnp.asarray(indices), weights) for indices in self.routings]

    @property
    def needed_bytes(self) -> float:
        return needed_bytes(self.routings, self.shape.hidden, self.inner)

    @property
    def flops(self) -> int:
        return 2 * 3 * self.tokens * self.shape.top_k * self.shape.hidden * self.inner

    @functools.cached_property
    def experts_struct(self) -> TiledExperts:
        return jax.eval_shape(random_experts, jax.random.key(0), self.shape.experts, self.shape.hidden, self.inner)

    def compile(self, config: Config | Rings | None, backend: str) -> Any:
        """The program that `timing.measure` runs."""

        def op(experts: TiledExperts, x: jax.Array, indices: jax.Array, weights: jax.Array) -> jax.Array:
            return int4_experts(x, indices, weights, experts, backend=backend, config=config)

        return timing.several_calls(op).lower((self.experts_struct,), self.inputs).compile()

    def expected(self, experts: TiledExperts) -> dict[int, jax.Array]:
        """float32 results of the first and the last token of the last input."""
        _, indices, weights = self.inputs[-1]
        return {
            t: sum((weights[t, k] * _down(experts, indices[t, k], h[k]) for k in range(len(h))), jnp.zeros(()))
            for t, h in self.expected_activations(experts).items()
        }

    def expected_activations(self, experts: TiledExperts) -> dict[int, jax.Array]:
        """float32 [top_k, inner] of the same tokens, between the two halves of the layer."""
        x, indices, _ = self.inputs[-1]
        return {t: jnp.stack([_activations(experts, e, x[t]) for e in indices[t]]) for t in (0, self.tokens - 1)}


def error(expected: dict[int, jax.Array], outputs: list[Any]) -> float:
    """Largest relative norm of the difference of a token's result."""
    y = outputs[-1]
    off = [jnp.linalg.norm(y[t].astype(jnp.float32) - e) / jnp.linalg.norm(e) for t, e in expected.items()]
    return float(max(off))


_product = functools.partial(jnp.matmul, precision="highest")


@jax.jit
def _activations(experts: TiledExperts, expert: jax.Array, x: jax.Array) -> jax.Array:
    gate, up = (_product(dense_expert(experts, part, expert), x.astype(jnp.float32)) for part in ("gate", "up"))
    return jax.nn.silu(gate) * up


@jax.jit
def _down(experts: TiledExperts, expert: jax.Array, h: jax.Array) -> jax.Array:
    return _product(dense_expert(experts, "down", expert), h)


def marlin_us(case: Case, ceiling: float, kind: str) -> float | None:
    """Of uniform routing; on another kind of GPU, what its read ceiling makes of the H200's time."""
    measured = MARLIN_US.get(case.inner, {}).get(case.tokens) if case.pattern == "uniform" else None
    return measured if measured is None or kind == MARLIN_DEVICE else measured * MARLIN_CEILING_GB_S / ceiling


def rows(
    cases: list[Case], configs: list[Config | Rings], backend: str, study: Study | None, threads: int, **options: int
) -> Iterator[dict[str, Any]]:
    """Everything is compiled before anything is measured."""
    small = backend != "triton"  # an emulation, to try the program itself
    ceiling = timing.read_ceiling(2**22) if small else timing.read_ceiling()
    peak = timing.matmul_peak(256) if small else timing.matmul_peak()
    jobs = [functools.partial(case.compile, config, backend) for case, config in zip(cases, configs, strict=True)]
    yardsticks = [case for case in cases if study and case.pattern == "uniform"]
    jobs += [functools.partial(study.compile, case) for case in yardsticks if study]
    for case in cases:
        case.inputs  # noqa: B018 - made here and not by all threads
    programs: list[Any] = timing.compile_all(jobs, threads=threads)
    if failure := next((p for p in programs if isinstance(p, Exception)), None):
        raise failure
    theirs = dict(zip(yardsticks, programs[len(cases) :], strict=True))
    weights: dict[int, TiledExperts] = {}
    for case, config, program in zip(cases, configs, programs, strict=False):
        if case.inner not in weights:
            weights.clear()
            if study:
                study.clear()
            s = case.shape
            weights[case.inner] = random_experts(jax.random.key(3), s.experts, s.hidden, case.inner)
        experts = weights[case.inner]
        off = error(case.expected(experts), program((experts,), case.inputs))
        study_us = study.measure(case, theirs[case], **options) if study and case in theirs else None
        took = timing.measure(program, (experts,), case.inputs, **options)
        peer = marlin_us(case, ceiling, device_kind())
        yield {
            "tokens": case.tokens,
            "intermediate": case.inner,
            "routing": case.pattern,
            "us": round(took.median_us, 2),
            "min_us": round(took.min_us, 2),
            "needed_bytes": round(case.needed_bytes),
            "read_ceiling_gb_s": round(ceiling, 1),
            "fraction_of_ceiling": round(case.needed_bytes / took.median_us / 1e3 / ceiling, 4),
            "fraction_of_matmul_peak": round(case.flops / took.median_us / 1e6 / peak, 4),
            "marlin_us": peer and round(peer, 2),
            "study_us": study_us and round(study_us, 2),
            "relative_error": float(f"{off:.2e}"),
            "config": to_json(config),
        }


def main(argv: list[str] | None = None, prog: str = "python -m pallas_kernels.int4_experts.bench") -> None:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--out", required=True, help="JSON file, written after every row")
    parser.add_argument("--seconds", type=float, default=600, help="start no further row after this long")
    parser.add_argument("--study", help="folder of another implementation to time in the same run")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--patterns", nargs="+", default=("uniform",), choices=("uniform", "skewed"))
    parser.add_argument("--table", help="configurations from this file instead of the device's")
    parser.add_argument("--threads", type=int, default=16, help="programs compiled at once")
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--backend", default="triton", choices=("triton", "interpret"))
    parser.add_argument(
        "--shape", type=int, nargs=3, default=(EXPERTS, HIDDEN, TOP_K), metavar="N", help="experts, hidden, top-k"
    )
    options = parser.parse_args(argv)

    start, done = time.monotonic(), []
    shape = Shape(*options.shape)
    cases = [Case(shape, n, t, p) for n in options.widths for p in options.patterns for t in options.tokens]
    study = Study(options.study) if options.study else None
    table = json.loads(Path(options.table).read_text()) if options.table else device_table(device_kind())
    configs = [choose(table, case.tokens, case.inner, KERNELS[options.backend]) for case in cases]
    min_ops = 96 if options.backend == "triton" else 1
    sizes = {"repetitions": options.repetitions, "min_ops": min_ops}
    for row in rows(cases, configs, options.backend, study, options.threads, **sizes):
        done.append(row)
        timing.write_rows(options.out, done, **timing.device_facts())
        ratio = f"{row['us'] / row['marlin_us']:.2f} of Marlin" if row["marlin_us"] else ""
        beside = f"study {row['study_us']}" if row["study_us"] else ""
        print(
            f"N={row['intermediate']} T={row['tokens']} {row['routing']}: {row['us']} us, "
            f"{row['fraction_of_ceiling']:.3f} of the read ceiling, {row['fraction_of_matmul_peak']:.3f} of the matmul "
            f"peak {ratio} {beside} error {row['relative_error']}",
            flush=True,
        )
        if time.monotonic() - start > options.seconds:
            print(f"out of time after {len(done)} of {len(cases)} rows", flush=True)
            break


if __name__ == "__main__":
    main()
