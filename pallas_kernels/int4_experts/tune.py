"""Searches configurations of the INT4 experts on this GPU, and puts the best into its table.

    python -m pallas_kernels.int4_experts.tune --out runs/int4_tune.json
    python -m pallas_kernels.int4_experts.tune --apply runs/int4_tune.json

For every (expert width, tokens): gate+up alone, then down alone on what the best few gate+up leave it, then the best
sums as whole layers beside the present choice. So the number of candidates is a sum of two, not a product. Other
processes compile, always what is nearest to the best so far, while this one measures. Times are means of uniform and
skewed routing; only those of whole layers are scores. The second needs no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import timing
from pallas_kernels.compilers import CompileError, Compilers
from pallas_kernels.device import device_kind
from pallas_kernels.int4_experts import triton
from pallas_kernels.int4_experts.bench import EXPERTS, HIDDEN, TOKENS, TOP_K, WIDTHS, Case, Shape, error
from pallas_kernels.int4_experts.candidates import Waiting, down_candidates, gate_up_candidates, with_down
from pallas_kernels.int4_experts.config import (
    TABLES,
    Config,
    Ring,
    Rings,
    Tile,
    choose,
    device_table,
    from_json,
    kernel_of,
    table_name,
)
from pallas_kernels.int4_experts.layout import TiledExperts, padded
from pallas_kernels.int4_experts.workload import Pattern, random_experts

Part = Literal["gate_up", "down", "layer"]
Link = tuple[str, int, int]
"""What down finds: grouping, tokens in a group, partial sums."""

MAX_ERROR = 5e-3
LINKS = 4
FINALISTS = 5
REPETITIONS: dict[Part, int] = {"gate_up": 3, "down": 3, "layer": 8}
ENDS: dict[Part, float] = {"gate_up": 0.45, "down": 0.8, "layer": 1.0}
"""Shares of a size's time after which its parts are left."""
OPS_US = 4000
"""Of calls in a repetition."""


def link(config: Config) -> Link:
    return config.grouping, config.gate_up.tokens, config.gate_up.splits


def compile_part(
    part: Part, shape: Shape, inner: int, tokens: int, count: int, loops: int, config: Config, backend: str
) -> jax.stages.Compiled:
    """A program of `count` inputs `loops` times over, as `timing.several_calls` makes it."""
    op, experts, inputs = part_of_layer(part, shape, inner, tokens, config, backend)
    # there is nothing to autotune but the small sums, in every candidate anew
    quick: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"} if backend == "triton" else {}
    return timing.several_calls(op, loops).lower((experts,), [inputs] * count).compile(quick)


def part_of_layer(
    part: Part, shape: Shape, inner: int, tokens: int, config: Config, backend: str
) -> tuple[Callable[..., Any], TiledExperts, tuple[Any, ...]]:
    """A function op(experts, *inputs), and the shapes of its arguments."""
    interpret, struct = backend == "interpret", jax.ShapeDtypeStruct
    experts = Case(shape, inner, tokens).experts_struct
    x = struct((tokens, shape.hidden), jnp.bfloat16)
    indices, weights = (struct((tokens, shape.top_k), dtype) for dtype in (jnp.int32, jnp.float32))

    def gate_up(experts: TiledExperts, x: Any, indices: Any) -> Any:
        return triton.gate_up(x, indices, experts, config, interpret=interpret)

    def down(experts: TiledExperts, h: Any, groups: Any, indices: Any, weights: Any) -> Any:
        return triton.down(h, groups, indices, weights, experts, config, width=shape.hidden, interpret=interpret)

    def layer(experts: TiledExperts, x: Any, indices: Any, weights: Any) -> Any:
        return triton.int4_experts(x, indices, weights, experts, config, interpret=interpret)

    if part == "gate_up":
        return gate_up, experts, (x, indices)
    if part == "down":
        before = dataclasses.replace(config, down_form="group")  # as `tune` runs gate+up
        run = functools.partial(triton.gate_up, config=before, interpret=interpret)
        return down, experts, (*jax.eval_shape(run, x, indices, experts), indices, weights)
    return layer, experts, (x, indices, weights)


class Cell:
    """What was measured of one expert width and number of tokens.

    Attributes:
        rows: a result per candidate.
        us: by part, the time of each candidate that was right: of the whole layer, for down with its gate+up.
    """

    def __init__(
        self, shape: Shape, inner: int, tokens: int, experts: Callable[[], TiledExperts], backend: str
    ) -> None:
        self.case = Case(shape, inner, tokens)
        self._cases: dict[Pattern, Case] = {p: dataclasses.replace(self.case, pattern=p) for p in get_args(Pattern)}
        self._experts, self._backend = experts, backend
        self.rows: list[dict[str, Any]] = []
        self.us: dict[Part, dict[Config, float]] = {part: {} for part in get_args(Part)}
        self._left: dict[Link, tuple[float, Config, Any]] = {}  # the best gate+up that leaves this, and its program
        self._fed: dict[Link, dict[Pattern, list[Any]]] = {}
        # in a repetition, at 3 TB/s or 300 TFLOP/s
        self._ops = math.ceil(OPS_US / max(self.case.needed_bytes / 3e6, self.case.flops / 3e8))
        self._loops = min(timing.loops_here(), math.ceil(self._ops / len(self.case.routings)))

    def best(self, part: Part, count: int) -> list[Config]:
        return sorted(self.us[part], key=self.us[part].__getitem__)[:count]

    def job(self, part: Part, config: Config) -> Callable[[], jax.stages.Compiled]:
        case, count = self.case, len(self.case.routings)
        size = case.shape, case.inner, case.tokens, count, self._loops
        return functools.partial(compile_part, part, *size, config, self._backend)

    def measure(self, part: Part, config: Config, program: Callable[..., Any] | CompileError) -> None:
        """What is wrong with a candidate is a result, not the end of the search."""
        row: dict[str, Any] = {"part": part, "tokens": self.case.tokens, "intermediate": self.case.inner}
        self.rows.append(row)
        try:
            if isinstance(program, CompileError):
                raise program
            inputs = self._inputs(part, "uniform", config)
            off = self._error(part, config, program((self._experts(),), inputs))
            if not off <= MAX_ERROR:
                raise ValueError(f"relative error {off:.1e}")
            times = {p: self._time(program, self._inputs(part, p, config), REPETITIONS[part]) for p in self._cases}
            us = sum(times.values()) / len(times)
            row |= {f"{pattern}_us": time for pattern, time in times.items()}
            if part == "layer":
                row["score"] = us
            if part == "gate_up" and us < self._left.get(link(config), (math.inf,))[0]:
                self._left[link(config)] = us, config, program
            self.us[part][config] = us + (self._left[link(config)][0] if part == "down" else 0.0)
        except Exception as failure:
            text = str(failure) if isinstance(failure, CompileError) else f"{type(failure).__name__}: {failure}"
            row["failed"] = text.splitlines()[0][:200]
        row["config"] = dataclasses.asdict(config)

    def feed(self, base: Config) -> list[Config]:
        """The best gate+up for the most promising few of what down may find, and for what it finds in `base`.

        Their results become the inputs of down.
        """
        links = sorted(self._left, key=lambda k: self._left[k][0])[:LINKS]
        if link(base) in self._left:
            links = list(dict.fromkeys([link(base), *links]))
        for each in links:
            program = self._left[each][2]
            self._fed[each] = {}
            for pattern, case in self._cases.items():
                outs = program((self._experts(),), self._inputs("gate_up", pattern, base))
                rest = [(indices, weights) for _, indices, weights in case.inputs]
                self._fed[each][pattern] = [(*out, *more) for out, more in zip(outs, rest, strict=True)]
        configs = [self._left[each][1] for each in links]
        self._left = {each: (*self._left[each][:2], None) for each in links}
        return configs

    def _inputs(self, part: Part, pattern: Pattern, config: Config) -> list[Any]:
        if part == "down":
            return self._fed[link(config)][pattern]
        inputs = self._cases[pattern].inputs
        return [one[:2] for one in inputs] if part == "gate_up" else inputs

    def _time(self, program: Any, inputs: list[Any], repetitions: int) -> float:
        options = {"repetitions": repetitions, "min_ops": self._ops, "min_ms": 0.0, "loops": self._loops}
        return timing.measure(program, (self._experts(),), inputs, **options).median_us

    @functools.cached_property
    def _expected(self) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
        return self.case.expected_activations(self._experts()), self.case.expected(self._experts())

    def _error(self, part: Part, config: Config, outputs: list[Any]) -> float:
        activations, results = self._expected
        if part != "gate_up":
            return error(results, outputs)
        case, top_k = self.case, self.case.shape.top_k
        h = np.asarray(outputs[-1][0]).reshape(-1, case.tokens * top_k, padded(case.inner))
        found = {}
        for token in activations:
            rows = h[:, token * top_k : (token + 1) * top_k].reshape(-1, h.shape[-1])
            found[token] = triton.activations(jnp.asarray(rows), top_k, case.experts_struct, config)
        return error(activations, [found])


def climb(
    cell: Cell,
    part: Part,
    starts: Sequence[Config],
    others: Iterable[Config],
    compilers: Compilers,
    until: float,
    most: int,
    rng: random.Random,
) -> None:
    """Measures `starts` and then always what is nearest to the best so far, at most `most`, until there is no more or
    the time is over. What compiles then is dropped when it comes."""
    first = list(dict.fromkeys(starts))
    waiting = Waiting([config for config in others if config not in first], rng)
    running: set[Config] = set()
    left = most

    def start() -> None:
        nonlocal left
        while compilers.idle and left and (first or waiting):
            config = first.pop(0) if first else waiting.take((cell.best(part, 1) or starts)[0])
            compilers.start((cell, part, config), cell.job(part, config))
            running.add(config)
            left -= 1

    while time.monotonic() < until:
        start()
        if not (running or (left and (first or waiting))):
            return
        for (whose, of, config), program in compilers.finished(until - time.monotonic()):
            if whose is cell and of == part:
                start()  # first, so that nobody waits for the measurement
                running.discard(config)
                cell.measure(part, config, program)
            if time.monotonic() >= until:
                return


def tune(
    cell: Cell, base: Config, compilers: Compilers, seconds: float, most: int, rng: random.Random, cores: int
) -> None:
    start = time.monotonic()

    def run(part: Part, starts: Sequence[Config], others: Iterable[Config] = ()) -> None:
        if starts:
            climb(cell, part, starts, others, compilers, start + ENDS[part] * seconds, most, rng)

    # gate+up writes the groups that down may look up, whether it does or not
    grouped = with_down(dataclasses.replace(base, down_form="group"), base.down)
    run("gate_up", [grouped], gate_up_candidates(cell.case, grouped, cores))
    starts = [with_down(dataclasses.replace(config, down_form=base.down_form), base.down) for config in cell.feed(base)]
    run("down", starts, itertools.chain.from_iterable(down_candidates(cell.case, config) for config in starts))
    run("layer", [base, *cell.best("down", FINALISTS)])


def search(
    shape: Shape,
    sizes: Sequence[tuple[int, int]],
    out: Path,
    seconds: float,
    most: int,
    workers: int,
    backend: str = "triton",
) -> None:
    """Tune (expert width, tokens) of `sizes`, with the time divided among them. Writes after every one.

    Raises:
        RuntimeError: nothing ran at the first size.
    """
    end = time.monotonic() + seconds
    cores = getattr(jax.devices()[0], "core_count", 1)  # a CPU device has none
    rng, rows = random.Random(0), []

    @functools.lru_cache(1)
    def experts_of(inner: int) -> TiledExperts:
        return random_experts(jax.random.key(3), shape.experts, shape.hidden, inner)

    with Compilers(workers) as compilers:
        for i, (inner, tokens) in enumerate(sizes):
            cell = Cell(shape, inner, tokens, functools.partial(experts_of, inner), backend)
            base = choose(device_table(device_kind()), tokens, inner)
            assert isinstance(base, Config)
            share = max(1.0, (end - time.monotonic()) / (len(sizes) - i))
            tune(cell, base, compilers, share, most, rng, cores)
            rows += cell.rows
            timing.write_rows(out, rows, **timing.device_facts())
            print(_summary(cell, base), flush=True)
            if not i and cell.rows and all("failed" in row for row in cell.rows):
                raise RuntimeError(f"none of {len(cell.rows)} candidates ran, the first: {cell.rows[0]['failed']}")


def _summary(cell: Cell, base: Config) -> str:
    tried = ", ".join(f"{sum(row['part'] == part for row in cell.rows)} {part}" for part in get_args(Part))
    failed = sum("failed" in row for row in cell.rows)
    lines = [f"N={cell.case.inner} T={cell.case.tokens}: tried {tried}; {failed} failed"]
    layers = cell.us["layer"]
    for config in dict.fromkeys([base, *cell.best("layer", 1)]):
        lines.append(f"  {layers[config]:.2f} us {config}" if config in layers else f"  not timed: {config}")
    return "\n".join(lines)


def apply(results: Sequence[Path]) -> None:
    """The fastest correct configuration of every size into the table of its device, other entries untouched.

    A choice of the Mosaic kernel stands beside Triton's where it is faster than that of the same results. Results
    without one leave it as it is: then measure it anew (`tune_mosaic`).
    """
    best: dict[str, dict[tuple[int, int, str], dict[str, Any]]] = {}
    for path in results:
        found = json.loads(path.read_text(encoding="utf-8"))
        of_device = best.setdefault(table_name(found["device"]), {})
        for row in found["rows"]:
            size = row["intermediate"], row["tokens"], kernel_of(row.get("config", {}))
            if "score" in row and row["score"] < of_device.get(size, {"score": math.inf})["score"]:
                of_device[size] = row
    for name, sizes in best.items():
        path = TABLES / f"{name}.json"
        table = json.loads(path.read_text(encoding="utf-8"))
        for (inner, tokens, kernel), row in sizes.items():
            entries = table["experts"].get(str(inner), [])
            kept = [e for e in entries if (e["tokens"], kernel_of(e)) != (tokens, kernel)]
            triton = sizes.get((inner, tokens, "triton"), {"score": math.inf})
            if kernel == "triton" or row["score"] < triton["score"]:
                kept.append({"tokens": tokens, **_compact(from_json(row["config"]))})
            table["experts"][str(inner)] = sorted(kept, key=lambda e: (e["tokens"], kernel_of(e)))
        write_table(path, table)


def _compact(config: Config | Rings) -> dict[str, Any]:
    """Without the fields that have their default."""
    if isinstance(config, Rings):
        rings = {"gate_up": config.gate_up, "down": config.down}
        changed = {
            name: {f.name: v for f in dataclasses.fields(Ring) if (v := getattr(ring, f.name)) != f.default}
            for name, ring in rings.items()
        }
        return {"kernel": "mosaic", "group": config.tokens, **changed}
    defaults = {f.name: f.default for f in dataclasses.fields(Tile)}

    def tile(t: Tile) -> dict[str, Any]:
        always = ("rows", "tokens", "warps", "stages")
        return {k: v for k, v in dataclasses.asdict(t).items() if k in always or v != defaults[k]}

    fields = {"grouping": config.grouping, "down_form": config.down_form}
    return {**fields, "gate_up": tile(config.gate_up), "down": tile(config.down)}


def write_table(path: Path, tuned: dict[str, Any]) -> None:
    """One line per entry."""

    def lines(entries: list[dict[str, Any]]) -> str:
        return "[\n" + ",\n".join("   " + json.dumps(e) for e in entries) + "\n  ]"

    widths = ",\n".join(f'  "{width}": {lines(entries)}' for width, entries in tuned["experts"].items())
    path.write_text(f'{{\n "experts": {{\n{widths}\n }},\n "matmul": {lines(tuned["matmul"])}\n}}\n', encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.int4_experts.tune", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file with every candidate, written after every size")
    parser.add_argument("--apply", type=Path, nargs="+", help="results whose best configurations go into the table")
    parser.add_argument("--seconds", type=float, default=1800, help="divided among the sizes")
    parser.add_argument("--most", type=int, default=1000, help="candidates per size for gate+up, and for down, at most")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=max(1, cores - 1), help="processes that compile")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    options = parser.parse_args(argv)
    if options.apply:
        apply(options.apply)
        return
    if options.out is None:
        parser.error("give --out or --apply")
    sizes = list(itertools.product(options.widths, options.tokens))
    search(Shape(EXPERTS, HIDDEN, TOP_K), sizes, options.out, options.seconds, options.most, options.workers)


if __name__ == "__main__":
    main()
