"""Searches configurations of the INT4 experts on this GPU, and puts the best into its table.

    python -m pallas_kernels.int4_experts.tune --out runs/int4_tune.json
    python -m pallas_kernels.int4_experts.tune --apply runs/int4_tune.json

The first climbs from the present choice of every (expert width, tokens): passes vary gate+up and down in turn, the
neighbours of the best so far first, then some that differ from it in two ways. All candidates of a pass are compiled,
then timed alone, as whole layers with uniform and with skewed routing: the score is the mean of both. The last pass
times the best few again. The second needs no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels import timing
from pallas_kernels.device import device_kind
from pallas_kernels.int4_experts.bench import EXPERTS, HIDDEN, TOKENS, TOP_K, WIDTHS, Case, Shape, error
from pallas_kernels.int4_experts.config import (
    TABLES,
    Config,
    Grouping,
    Tile,
    choose,
    device_table,
    from_json,
    table_name,
)
from pallas_kernels.int4_experts.layout import TiledExperts, padded
from pallas_kernels.int4_experts.triton import NARROW
from pallas_kernels.int4_experts.workload import random_experts

MAX_ERROR = 5e-3
FINALISTS = 4
OPS_US = 4000  # of calls in a repetition
INPUTS = 4
"""Per program, as few as do not stay in the L2 cache: every call of a kernel is compiled anew."""
ROWS_AND_WARPS = ((16, 1), (32, 1), (32, 2), (64, 2), (64, 4), (64, 8))


def gate_up_candidates(case: Case, base: Config, cores: int) -> Iterator[Config]:
    """Variations of grouping and gate+up; `base.down` follows where it has to."""
    used = float(np.mean([len(np.unique(r)) for r in case.routings]))
    density = case.tokens * case.shape.top_k / used
    for grouping, (rows, warps), tokens, count, stages, splits, scale_on in itertools.product(
        _groupings(case),
        ROWS_AND_WARPS,
        _token_tiles(density),
        (1, 2),
        (2, 3, 4, 5),
        (1, 2, 3, 4, 5, 7, 8, 14),
        ("sum", "weight"),
    ):
        programs = used * max(1, density / tokens) * padded(case.inner) / (rows * count) * splits
        warps_per_core = programs * warps / cores
        wide = rows * count * tokens / (warps * 32) > 64  # the accumulators of gate and up fill the registers
        few_or_many = warps_per_core < 1 or (splits > 1 and warps_per_core > 64)
        if wide or few_or_many or (scale_on == "weight" and tokens < 16) or (grouping == "row" and tokens > 8):
            continue
        down = dataclasses.replace(base.down, tokens=tokens if base.down_form == "group" else 8)
        yield Config(grouping, base.down_form, Tile(rows, tokens, warps, stages, count, splits, 1, scale_on), down)


def down_candidates(case: Case, base: Config) -> Iterator[Config]:
    narrow = padded(case.inner) <= NARROW
    forms = ["group"] + (["token"] if narrow and case.tokens <= 64 else [])
    for form, (rows, warps), count, stages, steps, scale_on in itertools.product(
        forms, ROWS_AND_WARPS, (1, 2), (2, 3, 4, 5), (1, 2, 4, 7, 8, 14) if narrow else (1,), ("sum", "weight")
    ):
        tokens = base.gate_up.tokens if form == "group" else 8
        wide = rows * count * tokens / (warps * 32) > 64
        if wide or (form == "token" and (steps > 1 or scale_on == "weight")) or (scale_on == "weight" and tokens < 16):
            continue
        down = Tile(rows, tokens, warps, stages, count, 1, steps, scale_on)
        yield dataclasses.replace(base, down_form=form, down=down)


def _groupings(case: Case) -> list[Grouping]:
    assignments = case.tokens * case.shape.top_k
    fits: dict[Grouping, bool] = {
        "row": assignments <= 160,
        "scan": 24 < assignments <= 528,
        "align": assignments > 128,
    }
    return [name for name, possible in fits.items() if possible]


def _token_tiles(density: float) -> Sequence[int]:
    """About as many as an expert has."""
    return [t for t in (8, 16, 32, 64, 128) if density / 5 <= t <= max(8, 3 * density)] or [8]


def nearest(candidates: Sequence[Config], base: Config, count: int, rng: random.Random) -> list[Config]:
    """`count` of them: those that differ from `base` in the fewest ways first, equals in random order.

    Rows and warps count as one way, and so does what a number of tokens entails.
    """

    def ways(config: Config) -> int:
        fields = ("stages", "count", "splits", "steps", "scale_on")
        tiles = (config.gate_up, base.gate_up), (config.down, base.down)
        differ = [getattr(a, f) != getattr(b, f) for a, b in tiles for f in fields]
        differ += [(a.rows, a.warps) != (b.rows, b.warps) for a, b in tiles]
        differ += [config.gate_up.tokens != base.gate_up.tokens, config.grouping != base.grouping]
        return sum(differ) + (config.down_form != base.down_form)

    shuffled = rng.sample(candidates, len(candidates))
    return sorted(shuffled, key=ways)[:count]


class Cell:
    """The candidates of one expert width and number of tokens, and their times so far."""

    def __init__(self, case: Case, skewed: Case, experts: TiledExperts, backend: str, threads: int) -> None:
        self.case, self.skewed, self.experts = case, skewed, experts
        self._backend, self._threads = backend, threads
        self._expected = case.expected(experts)
        self._programs: dict[Config, Any] = {}
        # enough calls for OPS_US in a repetition, if they read 3 TB/s
        self._ops = max(len(case.inputs), math.ceil(OPS_US * 3e6 / case.needed_bytes))
        self.rows: dict[Config, dict[str, Any]] = {}

    def best(self, count: int = 1) -> list[Config]:
        right = [c for c, row in self.rows.items() if "score" in row]
        return sorted(right, key=lambda c: self.rows[c]["score"])[:count]

    def compile(self, configs: Sequence[Config], seconds: float) -> None:
        """What is not compiled in time is left out."""
        new = [c for c in dict.fromkeys(configs) if c not in self._programs and c not in self.rows]
        # there is nothing to autotune but the small sums, in every candidate anew
        quick = {"xla_gpu_autotune_level": 0} if self._backend == "triton" else {}
        jobs = [functools.partial(self.case.compile, c, self._backend, **quick) for c in new]
        results = timing.compile_all(jobs, threads=self._threads, seconds=seconds)
        self._programs |= {c: r for c, r in zip(new, results, strict=True) if r is not None}

    def measure(self, configs: Sequence[Config], until: float, repetitions: int) -> None:
        for config in configs:
            if time.monotonic() > until:
                return
            if (program := self._programs.get(config)) is None:
                continue
            row: dict[str, Any] = {"tokens": self.case.tokens, "intermediate": self.case.inner}
            try:
                if isinstance(program, Exception):
                    raise program
                off = error(self._expected, program((self.experts,), self.case.inputs))
                if not off <= MAX_ERROR:
                    raise ValueError(f"relative error {off:.1e}")
                row["uniform_us"] = self._time(program, self.case, repetitions)
                row["skewed_us"] = self._time(program, self.skewed, repetitions)
                row["score"] = (row["uniform_us"] + row["skewed_us"]) / 2
            except Exception as failure:  # a candidate that does not fit is a result, not the end of the search
                row["failed"] = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
                self._programs[config] = failure
            self.rows[config] = {**row, "config": dataclasses.asdict(config)}

    def _time(self, program: Any, case: Case, repetitions: int) -> float:
        options = {"repetitions": repetitions, "min_ops": self._ops}
        return timing.measure(program, (self.experts,), case.inputs, **options).median_us


def tune(cell: Cell, base: Config, candidates: int, seconds: float, rng: random.Random, cores: int) -> None:
    """Two rounds of gate+up and down, then the finalists. Each pass compiles for no longer than half
    of its share of the time."""
    start = time.monotonic()

    def run(configs: Sequence[Config], until: float, repetitions: int) -> None:
        until = start + until * seconds
        cell.compile(configs, seconds=max(1.0, (until - time.monotonic()) / 2))
        cell.measure(configs, until, repetitions)

    run([base], 0.1, 6)
    for i, vary in enumerate(("gate_up", "down") * 2):
        best = cell.best()[0] if cell.best() else base
        case = cell.case
        found = gate_up_candidates(case, best, cores) if vary == "gate_up" else down_candidates(case, best)
        new = [c for c in found if c not in cell.rows]
        run(nearest(new, best, candidates, rng), (0.35, 0.6, 0.75, 0.9)[i], 4)
    cell.measure(cell.best(FINALISTS), start + seconds, 16)


def search(
    shape: Shape,
    sizes: Sequence[tuple[int, int]],
    out: Path,
    seconds: float,
    candidates: int,
    threads: int,
    backend: str = "triton",
) -> None:
    """Tune (expert width, tokens) of `sizes`, with the time divided among them. Writes after every one."""
    end = time.monotonic() + seconds
    cores = getattr(jax.devices()[0], "core_count", 1)  # a CPU device has none
    rng, rows = random.Random(0), []
    experts: tuple[int, TiledExperts] | None = None
    for i, (inner, tokens) in enumerate(sizes):
        if experts is None or experts[0] != inner:
            experts = None  # free before the next
            experts = inner, random_experts(jax.random.key(3), shape.experts, shape.hidden, inner)
        case, skewed = (Case(shape, inner, tokens, pattern, INPUTS) for pattern in ("uniform", "skewed"))
        cell = Cell(case, skewed, experts[1], backend, threads)
        base = choose(device_table(device_kind()), tokens, inner)
        share = max(1.0, (end - time.monotonic()) / (len(sizes) - i))
        tune(cell, base, candidates, share, rng, cores)
        rows += cell.rows.values()
        timing.write_rows(out, rows, **timing.device_facts())
        failed = sum("failed" in row for row in cell.rows.values())
        print(f"N={inner} T={tokens}: {len(cell.rows)} tried, {failed} failed", flush=True)
        for config in [base, *cell.best()]:
            row = cell.rows.get(config, {})
            print(f"  uniform {row.get('uniform_us')} skewed {row.get('skewed_us')} {config}", flush=True)


def apply(results: Sequence[Path]) -> None:
    """The fastest correct configuration of every size into the table of its device, other entries untouched."""
    best: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}
    for path in results:
        found = json.loads(path.read_text(encoding="utf-8"))
        of_device = best.setdefault(table_name(found["device"]), {})
        for row in found["rows"]:
            size = row["intermediate"], row["tokens"]
            if "score" in row and row["score"] < of_device.get(size, {"score": math.inf})["score"]:
                of_device[size] = row
    for name, sizes in best.items():
        path = TABLES / f"{name}.json"
        table = json.loads(path.read_text(encoding="utf-8"))
        for (inner, tokens), row in sizes.items():
            kept = [e for e in table["experts"].get(str(inner), []) if e["tokens"] != tokens]
            entry = {"tokens": tokens, **_compact(from_json(row["config"]))}
            table["experts"][str(inner)] = sorted([*kept, entry], key=lambda e: e["tokens"])
        write_table(path, table)


def _compact(config: Config) -> dict[str, Any]:
    """Without the fields that have their default."""
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
    parser.add_argument("--candidates", type=int, default=48, help="tried in a pass at most")
    parser.add_argument("--threads", type=int, default=16, help="programs compiled at once")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    options = parser.parse_args(argv)
    if options.apply:
        apply(options.apply)
        return
    if options.out is None:
        parser.error("give --out or --apply")
    sizes = list(itertools.product(options.widths, options.tokens))
    search(Shape(EXPERTS, HIDDEN, TOP_K), sizes, options.out, options.seconds, options.candidates, options.threads)


if __name__ == "__main__":
    main()
