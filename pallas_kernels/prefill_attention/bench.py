"""Time of prefill attention on this GPU: one tensor-parallel rank's share of a chunk; writes JSON.

python -m pallas_kernels.prefill_attention.bench --out docs/results/prefill_attention_h200.json [--tune]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import timing
from pallas_kernels.device import device_kind
from pallas_kernels.prefill_attention import SEGMENT, prefill_attention, reference
from pallas_kernels.prefill_attention.config import Config, choose

NOPE, ROPE, V, RANK = 128, 64, 128, 512
SCALE = 0.1447
CANDIDATES = (
    Config(128, 64, 8, 2),
    Config(128, 64, 8, 3),
    Config(128, 128, 8, 2),
    Config(64, 64, 4, 3),
    Config(64, 128, 4, 2),
    Config(128, 32, 8, 4),
)


@dataclasses.dataclass(frozen=True)
class Case:
    heads: int
    tokens: int
    prefix: int

    @property
    def flops(self) -> int:
        """Of materialised attention over the pairs that see each other, keys and values expanded once."""
        pairs = self.tokens * self.prefix + self.tokens * (self.tokens + 1) // 2
        rows = self.prefix + self.tokens
        return 2 * self.heads * (pairs * (NOPE + ROPE + V) + rows * RANK * (NOPE + V))


CASES = (Case(8, 8192, 32768), Case(8, 8192, 0), Case(8, 1024, 32768), Case(8, 8192, 122880))


def data(case: Case, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 4)

    def normal(i: int, *shape: int) -> jax.Array:
        return jax.random.normal(keys[i], shape, jnp.bfloat16)

    return (
        normal(0, 1, case.tokens, case.heads, NOPE) * jnp.bfloat16(0.3),
        normal(1, 1, case.tokens, case.heads, ROPE) * jnp.bfloat16(0.3),
        normal(2, 1, case.prefix + case.tokens, RANK + ROPE),
        jnp.full((1,), case.prefix, jnp.int32),
        normal(3, case.heads, NOPE + V, RANK) * jnp.bfloat16(RANK**-0.5),
    )


_reference = jax.jit(reference, static_argnames="scale")


def error(args: tuple[jax.Array, ...], out: jax.Array) -> float:
    """Largest relative norm of the error of the last 32 tokens, against float32."""
    q_nope, q_rope, cache, lengths, up = args
    n = min(32, q_nope.shape[1])
    start = lengths + q_nope.shape[1] - n
    expected = _reference(q_nope[:, -n:], q_rope[:, -n:], cache, start, up, scale=SCALE)
    off = jnp.linalg.norm(out[:, -n:].astype(jnp.float32) - expected, axis=-1)
    return float(jnp.max(off / jnp.linalg.norm(expected, axis=-1)))


def run(cases: tuple[Case, ...], out: Path, seconds: float, tune: bool, backend: str = "triton") -> None:
    deadline = time.monotonic() + seconds
    seed = int.from_bytes(os.urandom(3), "little")
    rows: list[dict[str, Any]] = []
    header = {**timing.device_facts(), "matmul_peak_tflop_s": round(timing.matmul_peak(), 1), "segment": SEGMENT}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        waiting = []
        for case in cases:
            args = data(case, seed)
            tuned = choose(device_kind(), jnp.dtype(jnp.bfloat16), case.tokens * case.heads)
            for config in dict.fromkeys([tuned, *CANDIDATES]) if tune else [tuned]:
                op = functools.partial(prefill_attention, scale=SCALE, backend=backend, config=config)
                waiting.append((case, config, args, pool.submit(timing.several_calls(op).lower(args, [()]).compile)))
        concurrent.futures.wait([program for *_, program in waiting])  # a busy host delays launches
        for case, config, args, program in waiting:
            if time.monotonic() > deadline:
                print("out of time", flush=True)
                break
            row: dict[str, Any] = {**dataclasses.asdict(case), "config": dataclasses.asdict(config)}
            try:
                f = program.result()
                us = timing.measure(f, args, [()], repetitions=5, min_ops=2).min_us
                row |= {
                    "us": round(us, 1),
                    "tflop_s": round(case.flops / us / 1e6, 1),
                    "matmul_peak_fraction": round(case.flops / us / 1e6 / timing.matmul_peak(), 3),
                    "error": error(args, f(args, [()])[0]),
                }
            except Exception as failure:  # a candidate that does not fit is a result, not the end of the search
                row["failed"] = str(failure).splitlines()[0][:200]
            rows.append(row)
            print(row, flush=True)
            timing.write_rows(out, rows, **header)


def main(argv: list[str] | None = None, prog: str = "python -m pallas_kernels.prefill_attention.bench") -> None:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file, written after every row")
    parser.add_argument("--seconds", type=float, default=300.0, help="start no measurement after this long")
    parser.add_argument("--tune", action="store_true", help="time other tile sizes too")
    args = parser.parse_args(argv)
    run(CASES, args.out, args.seconds, args.tune)


if __name__ == "__main__":
    main()
