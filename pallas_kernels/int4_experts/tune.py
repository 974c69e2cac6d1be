"""Find good configurations on this device: python -m pallas_kernels.int4_experts.tune --out DIR

Whole layers are timed, with uniform and with skewed routing; a candidate's score is the mean of both. First gate+up is
varied beside the present choice for down, then down, then the best few of each together. DIR/tune.json has a row per
measurement, DIR/table.json the device's table with the winners in it, both written after every cell.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels import timing
from pallas_kernels.device import device_kind
from pallas_kernels.int4_experts.bench import EXPERTS, HIDDEN, TOKENS, TOP_K, WIDTHS, Case, Shape
from pallas_kernels.int4_experts.config import Config, Tile, choose, device_table
from pallas_kernels.int4_experts.layout import TiledExperts, padded
from pallas_kernels.int4_experts.triton import NARROW
from pallas_kernels.int4_experts.workload import random_experts

MAX_ERROR = 5e-3
AT_ONCE = 12  # compilations


def gate_up_candidates(case: Case, base: Config) -> list[Config]:
    """Variations of grouping and gate+up; `base.down` follows where it has to."""
    used = float(np.mean([len(np.unique(r)) for r in case.routings]))
    density = case.tokens * case.shape.top_k / used
    found = []
    for grouping, (rows, warps), tokens, count, stages, splits, scale_on in itertools.product(
        _groupings(case),
        ((16, 1), (32, 1), (32, 2), (64, 2), (64, 4), (64, 8)),
        _token_tiles(density),
        (1, 2),
        (2, 3, 4, 5),
        (1, 2, 3, 4, 5, 7, 8, 14),
        ("sum", "weight"),
    ):
        programs = used * max(1, density / tokens) * padded(case.inner) / (rows * count) * splits
        per_core = programs * warps / 132
        wide = rows * count * tokens / (warps * 32) > 64  # the accumulators of gate and up fill the registers
        if wide or (splits > 1 and per_core > 64) or per_core < 1 or (scale_on == "weight" and tokens < 16):
            continue
        if grouping == "row" and tokens > 8:
            continue
        tile = Tile(rows, tokens, warps, stages, count, splits, 1, scale_on)
        found.append(dataclasses.replace(base, grouping=grouping, gate_up=tile))
    return found


def down_candidates(case: Case, base: Config) -> list[Config]:
    narrow = padded(case.inner) <= NARROW
    forms = ["group"] + (["token"] if narrow and case.tokens <= 64 else [])
    found = []
    for form, (rows, warps), count, stages, steps, scale_on in itertools.product(
        forms,
        ((16, 1), (32, 1), (32, 2), (64, 2), (64, 4), (64, 8)),
        (1, 2),
        (2, 3, 4, 5),
        (1, 2, 4, 7, 8, 14) if narrow else (1,),
        ("sum", "weight"),
    ):
        tokens = base.gate_up.tokens if form == "group" else 8
        wide = rows * count * tokens / (warps * 32) > 64
        if wide or (form == "token" and (steps > 1 or scale_on == "weight")) or (scale_on == "weight" and tokens < 16):
            continue
        found.append(
            dataclasses.replace(base, down_form=form, down=Tile(rows, tokens, warps, stages, count, 1, steps, scale_on))
        )
    return found


def _groupings(case: Case) -> Sequence[str]:
    assignments = case.tokens * case.shape.top_k
    return [
        name
        for name, fits in (("row", assignments <= 160), ("scan", 24 < assignments <= 528), ("align", assignments > 256))
        if fits
    ]


def _token_tiles(density: float) -> Sequence[int]:
    """About as many as an expert has."""
    return [t for t in (8, 16, 32, 64, 128) if density / 5 <= t <= max(8, 3 * density)] or [8]


class Tuner:
    def __init__(self, folder: Path, backend: str, shape: Shape, start: dict[str, Any]) -> None:
        self.folder, self.backend, self.shape = folder, backend, shape
        self.table = json.loads(json.dumps(start))
        self.rows: list[dict[str, Any]] = []
        self._experts: tuple[int, TiledExperts] | None = None

    def cell(self, inner: int, tokens: int, seconds: float, seed: int = 0) -> None:
        """Tune one expert width and number of tokens."""
        case, skewed = (Case(self.shape, inner, tokens, pattern) for pattern in ("uniform", "skewed"))
        if self._experts is None or self._experts[0] != inner:
            self._experts = None
            weights = random_experts(jax.random.key(3), self.shape.experts, self.shape.hidden, inner)
            self._experts = (inner, weights)
        base = choose(self.table, tokens, inner)
        rng = random.Random(seed)
        start = time.monotonic()

        def best_of(candidates: list[Config], until: float, keep: int) -> list[Config]:
            rng.shuffle(candidates)
            scored = self._measure(case, skewed, [base, *candidates], start + until * seconds)
            return [config for _, config in sorted(scored, key=lambda s: s[0])[:keep]]

        gate_ups = best_of(gate_up_candidates(case, base), 0.45, 5) or [base]
        downs = best_of(down_candidates(case, gate_ups[0]), 0.85, 4) or [base]
        both = [
            dataclasses.replace(g, down=d.down, down_form=d.down_form)
            for g, d in itertools.product(gate_ups, downs)
            if d.down_form == "token" or d.down.tokens == g.gate_up.tokens
        ]
        best_of(both, 1.0, 1)
        self._write(inner, tokens)

    def _measure(self, case: Case, skewed: Case, configs: list[Config], until: float) -> list[tuple[float, Config]]:
        """(score, config) of those that compile, are right and were reached in time."""
        scored = []
        experts = self._experts[1]
        seen = {json.dumps(r["config"]): r["score"] for r in self.rows if self._is_cell(r, case.inner, case.tokens)}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            programs = [(c, pool.submit(self._compile, case, c)) for c in dict.fromkeys(configs)]
            for config, program in programs:
                if time.monotonic() > until:
                    break
                if (known := seen.get(json.dumps(dataclasses.asdict(config)))) is not None:
                    scored.append((known, config))
                    continue
                row: dict[str, Any] = {"tokens": case.tokens, "intermediate": case.inner}
                try:
                    compiled = program.result(timeout=max(0.1, until + 5 - time.monotonic()))
                    error = case.error(experts, compiled((experts,), case.inputs), samples=1)
                    if not error <= MAX_ERROR:
                        raise ValueError(f"relative error {error:.1e}")
                    times = [
                        timing.measure(compiled, (experts,), c.inputs, repetitions=5, min_ops=32).median_us
                        for c in (case, skewed)
                    ]
                except Exception as e:  # one bad candidate must not end the run: it is recorded
                    self.rows.append({**row, "failed": f"{type(e).__name__}: {e}"[:300], "tried": str(config)})
                    continue
                score = sum(times) / 2
                scored.append((score, config))
                self.rows.append(
                    {
                        **row,
                        "score": score,
                        "uniform_us": times[0],
                        "skewed_us": times[1],
                        "config": dataclasses.asdict(config),
                    }
                )
            pool.shutdown(wait=False, cancel_futures=True)
        return scored

    def _compile(self, case: Case, config: Config) -> Any:
        return case.compile(config, self.backend)

    @staticmethod
    def _is_cell(row: dict[str, Any], inner: int, tokens: int) -> bool:
        return "score" in row and (row["intermediate"], row["tokens"]) == (inner, tokens)

    def _write(self, inner: int, tokens: int) -> None:
        done = sorted((r for r in self.rows if self._is_cell(r, inner, tokens)), key=lambda r: r["score"])
        failed = sum("failed" in r and (r["intermediate"], r["tokens"]) == (inner, tokens) for r in self.rows)
        self.folder.mkdir(parents=True, exist_ok=True)
        timing.write_rows(self.folder / "tune.json", self.rows, **timing.device_facts())
        if not done:
            print(f"N={inner} T={tokens}: nothing measured, {failed} failed", flush=True)
            return
        best = done[0]
        widths = self.table["experts"]
        kept = [e for e in widths.get(str(inner), []) if e["tokens"] != tokens]
        widths[str(inner)] = sorted([*kept, {"tokens": tokens, **best["config"]}], key=lambda e: e["tokens"])
        write_table(self.folder / "table.json", self.table)
        print(
            f"N={inner} T={tokens}: {best['uniform_us']:.1f} us uniform, {best['skewed_us']:.1f} skewed, "
            f"of {len(done)} ({failed} failed): {best['config']}",
            flush=True,
        )


def write_table(path: Path, tuned: dict[str, Any]) -> None:
    """One line per entry."""

    def lines(entries: list[dict[str, Any]]) -> str:
        return "[\n" + ",\n".join("   " + json.dumps(e) for e in entries) + "\n  ]"

    widths = ",\n".join(f'  "{width}": {lines(entries)}' for width, entries in tuned["experts"].items())
    path.write_text(f'{{\n "experts": {{\n{widths}\n }},\n "matmul": {lines(tuned["matmul"])}\n}}\n', encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.int4_experts.tune", description=__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for tune.json and table.json")
    parser.add_argument("--seconds", type=float, default=600, help="divided among the cells")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--table", type=Path, help="start from the choices in this file instead of the device's")
    parser.add_argument("--backend", default="triton", choices=("triton", "interpret"))
    parser.add_argument(
        "--shape", type=int, nargs=3, default=(EXPERTS, HIDDEN, TOP_K), metavar="N", help="experts, hidden, top-k"
    )
    options = parser.parse_args(argv)

    start = json.loads(options.table.read_text()) if options.table else device_table(device_kind())
    tuner = Tuner(options.out, options.backend, Shape(*options.shape), start)
    cells = list(itertools.product(options.widths, options.tokens))
    end = time.monotonic() + options.seconds
    for i, (inner, tokens) in enumerate(cells):
        tuner.cell(inner, tokens, max(1.0, (end - time.monotonic()) / (len(cells) - i)))


if __name__ == "__main__":
    main()
