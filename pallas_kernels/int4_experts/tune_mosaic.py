"""Searches choices of the Mosaic kernel of the INT4 experts on this GPU, beside the tuned choice of Triton's.

    python -m pallas_kernels.int4_experts.tune_mosaic --out runs/int4_mosaic.json
    python -m pallas_kernels.int4_experts.tune --apply runs/int4_mosaic.json

For every (expert width, tokens) and size of groups: gate+up and down alone, on random activations, then both with the
fastest of each as a whole layer. Scores are of whole layers, means of uniform and skewed routing, as those of `tune`.
The second needs no GPU, and keeps a choice where it is faster than Triton's of the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp

from pallas_kernels import timing
from pallas_kernels.device import device_kind
from pallas_kernels.int4_experts import mosaic
from pallas_kernels.int4_experts.align import align
from pallas_kernels.int4_experts.bench import EXPERTS, HIDDEN, TOKENS, TOP_K, WIDTHS, Case, Shape, error
from pallas_kernels.int4_experts.config import Config, Ring, Rings, choose, device_table, to_json
from pallas_kernels.int4_experts.layout import BLOCK_COLUMNS, BLOCK_ROWS, PLANE_COLUMNS, TiledExperts
from pallas_kernels.int4_experts.sort import gather
from pallas_kernels.int4_experts.triton import NARROW
from pallas_kernels.int4_experts.tune import MAX_ERROR
from pallas_kernels.int4_experts.workload import Pattern, random_experts

SHARED_BYTES = 227 * 1024
"""Of a program on Hopper."""
LARGEST_GROUP = 128
MARGINS = (1.0, 1.3, 1.6)
"""Sizes of groups over the mean number of tokens of an expert."""


def group_sizes(case: Case) -> list[int]:
    mean = case.tokens * case.shape.top_k / case.shape.experts
    return sorted({min(LARGEST_GROUP, 8 * math.ceil(mean * margin / 8)) for margin in MARGINS})


def gate_up_rings(group: int) -> list[Ring]:
    if group <= 32:
        return [Ring(stages=4), Ring(stages=3), Ring(warpgroups=2, stages=4)]
    return [Ring(warpgroups=2, stages=n, blocks=b) for n, b in ((3, 1), (4, 1), (2, 2))]


def down_rings(group: int, inner: int) -> list[Ring]:
    if inner <= NARROW:
        narrow = functools.partial(Ring, blocks=2, resident=True)
        return [narrow(stages=3, steps=14), narrow(stages=4, steps=7), narrow(stages=3, steps=14, warpgroups=2)]
    wide = [Ring(count=2, stages=4), Ring(warpgroups=2, count=2, stages=3)]
    return wide if group <= 32 else [*wide, Ring(warpgroups=4, stages=3)]


def fits(ring: Ring, group: int, columns: int, parts: int) -> bool:
    """Whether a program's shared memory holds it, barriers left out."""
    words = BLOCK_ROWS * PLANE_COLUMNS * 2
    weights = ring.warpgroups * ring.stages * ring.count * ring.blocks * parts * (words + words // 8)
    activations = group * 2 * (columns if ring.resident else ring.stages * ring.blocks * BLOCK_COLUMNS)
    results = ring.warpgroups * ring.count * group * BLOCK_ROWS * 2
    return weights + activations + results + 1024 <= SHARED_BYTES


class Half:
    """gate+up or down of one size of groups, with inputs for it."""

    def __init__(self, case: Case, group: int, part: str):
        self.case, self.group, self.part = case, group, part
        self.columns = case.shape.hidden if part == "gate_up" else case.inner
        rings = gate_up_rings(group) if part == "gate_up" else down_rings(group, case.inner)
        parts = 2 if part == "gate_up" else 1
        self.rings = [ring for ring in rings if fits(ring, group, self.columns, parts)]

    def compile(self, ring: Ring) -> Any:
        def op(experts: TiledExperts, x: jax.Array, expert_of_group: jax.Array) -> jax.Array:
            words, scales = getattr(experts, f"{self.part}_words"), getattr(experts, f"{self.part}_scales")
            return mosaic.product(x, expert_of_group, words, scales, ring)

        inputs = jax.eval_shape(lambda: self.inputs)
        return timing.several_calls(op).lower((self.case.experts_struct,), inputs).compile()

    @property
    def inputs(self) -> list[tuple[jax.Array, jax.Array]]:
        shape = self.case.shape
        made = []
        for x, indices, _ in self.case.inputs:
            groups, places = align(indices.reshape(-1), shape.experts, self.group, interpret=False)
            if self.part == "gate_up":
                made.append((gather(x, groups, places, shape.top_k, interpret=False)[0], groups))
            else:
                made.append(
                    (jax.random.normal(jax.random.key(9), (places.shape[0], self.columns), jnp.bfloat16), groups)
                )
        return made


def search(shape: Shape, sizes: Sequence[tuple[int, int]], out: Path, seconds: float, threads: int) -> None:
    """Of (expert width, tokens) in `sizes`. Writes after every one."""
    end, rows = time.monotonic() + seconds, []

    @functools.lru_cache(1)
    def experts_of(inner: int) -> TiledExperts:
        return random_experts(jax.random.key(3), shape.experts, shape.hidden, inner)

    for inner, tokens in sizes:
        if time.monotonic() > end:
            print("out of time", flush=True)
            return
        rows += list(_of_size(Case(shape, inner, tokens), functools.partial(experts_of, inner), threads))
        timing.write_rows(out, rows, **timing.device_facts())


def _of_size(case: Case, experts: Callable[[], TiledExperts], threads: int) -> Any:
    patterns = {p: dataclasses.replace(case, pattern=p) for p in get_args(Pattern)}
    for of in (case, *patterns.values()):
        of.inputs  # noqa: B018 - made here and not by all threads, nor in a trace
    halves = [Half(case, group, part) for group in group_sizes(case) for part in ("gate_up", "down")]
    jobs = [(half, ring) for half in halves for ring in half.rings]
    programs = timing.compile_all([functools.partial(half.compile, ring) for half, ring in jobs], threads=threads)
    best: dict[tuple[int, str], tuple[float, Ring]] = {}
    weights = (experts(),)
    for half, of_half in itertools.groupby(zip(jobs, programs, strict=True), key=lambda one: one[0][0]):
        inputs = half.inputs
        for (_, ring), program in of_half:
            row = {"part": half.part, "tokens": case.tokens, "intermediate": case.inner, "group": half.group}
            row["ring"] = dataclasses.asdict(ring)
            if isinstance(program, Exception):  # a candidate that does not fit is a result, not the end of the search
                yield {**row, "failed": str(program).splitlines()[0][:200]}
                continue
            us = timing.measure(program, weights, inputs, repetitions=3, min_ops=8, min_ms=6.0).median_us
            best[half.group, half.part] = min(best.get((half.group, half.part), (math.inf, ring)), (us, ring), key=_us)
            yield {**row, "us": round(us, 2)}
    both = [g for g in group_sizes(case) if (g, "gate_up") in best and (g, "down") in best]
    configs: list[Config | Rings] = [choose(device_table(device_kind()), case.tokens, case.inner)]
    configs += [Rings(g, best[g, "gate_up"][1], best[g, "down"][1]) for g in both]
    layers = timing.compile_all([functools.partial(case.compile, c, "triton") for c in configs], threads=threads)
    for config, layer in zip(configs, layers, strict=True):
        row = {"part": "layer", "tokens": case.tokens, "intermediate": case.inner, "config": to_json(config)}
        if isinstance(layer, Exception):
            yield {**row, "failed": str(layer).splitlines()[0][:200]}
            continue
        off = error(case.expected(experts()), layer(weights, case.inputs))
        times = {
            f"{pattern}_us": timing.measure(layer, weights, of.inputs, repetitions=4, min_ops=8, min_ms=6.0).median_us
            for pattern, of in patterns.items()
        }
        score = {"score": sum(times.values()) / len(times)} if off <= MAX_ERROR else {"failed": f"error {off:.1e}"}
        print(f"N={case.inner} T={case.tokens}: {times} error {off:.1e} {config}", flush=True)
        yield {**row, **times, **score}


def _us(found: tuple[float, Ring]) -> float:
    return found[0]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.int4_experts.tune_mosaic", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file with every candidate")
    parser.add_argument("--seconds", type=float, default=1800, help="start no further size after this long")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[t for t in TOKENS if t > 128])
    parser.add_argument("--threads", type=int, default=16, help="programs compiled at once")
    options = parser.parse_args(argv)
    sizes = list(itertools.product(options.widths, options.tokens))
    search(Shape(EXPERTS, HIDDEN, TOP_K), sizes, options.out, options.seconds, options.threads)


if __name__ == "__main__":
    main()
