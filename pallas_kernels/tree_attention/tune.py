"""Searches tile sizes for tree attention on this GPU, and puts the best into tuned.json.

    python -m pallas_kernels.tree_attention.tune --out runs/tune.json
    python -m pallas_kernels.tree_attention.tune --apply runs/tune.json

The first times every candidate (on the GPU); the second needs no GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import timing
from pallas_kernels.tree_attention.bench import error, measured, ours
from pallas_kernels.tree_attention.cases import CASES, Case, random_data
from pallas_kernels.tree_attention.config import Config, choose

TUNED = Path(__file__).parent / "tuned.json"
CASE_FIELDS = ("query_rows", "slots", "cache_rows")
LARGEST_ERROR = 5e-3
HOPPER = ("H100", "H200")  # in the kinds of the devices that the Mosaic kernel is for
MAX_INPUTS = 16
BATCH = 64


def candidates(query_rows: int, cores: int, hopper: bool) -> list[Config]:
    """Narrow tiles feed `mma.sync` from registers; 64 rows with 8 warps use the tensor cores' asynchronous products."""
    found = [
        Config(16, block, waves * cores, warps, stages)
        for block, warps, stages in ((32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 8, 2))
        for waves in (1, 2)
    ]
    if query_rows > 16:
        found += [Config(32, block, waves * cores, 8, 2) for block in (32, 64) for waves in (1, 2)]
    if query_rows > 32:
        found += [
            Config(64, block, waves * cores, 8, stages, True)
            for block, stages in ((64, 2), (32, 3), (32, 4))
            for waves in (1, 2)
        ]
        found = [c for c in found if c.rows > 16 or query_rows <= 64]
        if hopper:
            found += [Config(64, 64, waves * cores // 2, kernel="mosaic") for waves in (1, 2, 4, 8)]
    return found


def search(cases: tuple[Case, ...], out: Path, seconds: float, threads: int, backend: str = "triton") -> None:
    deadline = time.monotonic() + seconds
    facts = timing.device_facts()
    seed = int.from_bytes(os.urandom(3), "little")
    cores = getattr(jax.devices()[0], "core_count", 1)  # a CPU device has none
    rows: list[dict[str, Any]] = []
    todo = []
    for case in cases:
        data = random_data(case, seed)
        size = case.heads * case.tokens, case.streams, case.cache_rows
        base = choose(facts["device"], *size, data.q_latent.dtype, data.caches[0].dtype)
        hopper = any(name in facts["device"] for name in HOPPER)
        todo += [(case, size, data, config) for config in (base, *candidates(size[0], cores, hopper))]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        # in batches, each compiled before it is timed: a busy host delays launches
        for start in range(0, len(todo), BATCH):
            batch = todo[start : start + BATCH]
            futures = [pool.submit(ours, case, data, config, backend, MAX_INPUTS) for case, _, data, config in batch]
            concurrent.futures.wait(futures)
            for (case, size, data, config), future in zip(batch, futures, strict=True):
                if time.monotonic() > deadline:
                    print("out of time", flush=True)
                    return
                row: dict[str, Any] = dict(zip(CASE_FIELDS, size, strict=True))
                row["config"] = dataclasses.asdict(config)
                try:
                    program, shared, inputs = future.result()
                    row |= measured(
                        case, timing.measure(program, shared, inputs, repetitions=4, min_ops=24, min_ms=4.0)
                    )
                    row["error"] = error(data, program(shared, inputs)[-1], len(inputs) - 1)
                except Exception as failure:  # a candidate that does not fit is a result, not the end of the search
                    row["failed"] = str(failure).splitlines()[0][:200]
                rows.append(row)
                print(json.dumps(row), flush=True)
                timing.write_rows(out, rows, **facts)


def apply(results: list[Path]) -> None:
    """The fastest correct candidate of every case into the table of its device, other tables untouched.

    A Mosaic candidate stands beside the Triton one, which sizes that it cannot take still need, where it is faster.
    """
    tables = json.loads(TUNED.read_text(encoding="utf-8"))
    best: dict[str, dict[tuple, dict]] = {}
    for path in results:
        found = json.loads(path.read_text(encoding="utf-8"))
        for row in found["rows"]:
            if "us" in row and row["error"] < LARGEST_ERROR:
                of_device = best.setdefault(found["device"], {})
                if row["us"] < of_device.get(_key(row), {"us": math.inf})["us"]:
                    of_device[_key(row)] = row
    for kind, rows in best.items():
        table = {_key(case): case for case in tables.get(kind, [])} | rows
        for *size, kernel in rows:
            triton = rows.get((*size, "triton"))
            if kernel == "mosaic" and triton is not None and triton["us"] <= rows[*size, kernel]["us"]:
                del table[*size, kernel]
        tables[kind] = [{f: c[f] for f in (*CASE_FIELDS, "config")} for _, c in sorted(table.items())]
    lines = (f" {json.dumps(k)}: [\n" + ",\n".join("  " + json.dumps(c) for c in t) + "\n ]" for k, t in tables.items())
    TUNED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _key(case: dict) -> tuple:
    return *(case[f] for f in CASE_FIELDS), case["config"].get("kernel", "triton")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tree_attention.tune", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file with every candidate, written as they are timed")
    parser.add_argument("--apply", type=Path, nargs="+", help="results whose best candidates go into tuned.json")
    parser.add_argument("--seconds", type=float, default=1800.0, help="start no measurement after this long")
    parser.add_argument("--threads", type=int, default=16, help="programs compiled at once")
    parser.add_argument("--rows", type=int, nargs="*", help="only cases with these numbers of query rows")
    parser.add_argument("--prefix", type=int, nargs="*", help="only cases with these prefixes")
    args = parser.parse_args(argv)
    if args.apply:
        apply(args.apply)
        return
    if args.out is None:
        parser.error("give --out or --apply")
    chosen = (c for c in CASES if not args.rows or c.heads * c.tokens in args.rows)
    cases = tuple(c for c in chosen if not args.prefix or c.prefix in args.prefix)
    search(cases, args.out, args.seconds, args.threads)


if __name__ == "__main__":
    main()
