"""Times of tree attention on this GPU beside the read ceiling, the matmul peak and its peers; writes JSON.

python -m pallas_kernels.tree_attention.bench --out docs/results/tree_attention_h200.json
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import timing
from pallas_kernels.tree_attention import Config, plan, reference, tree_attention
from pallas_kernels.tree_attention.cases import CASES, RANK, ROPE, SCALE, Case, Data, random_data

# Microseconds on an H200 of the best kernel that takes no tree mask (FlashMLA or FlashAttention-3, causal chain of
# tokens + 1), by (heads, tokens + 1, streams, prefix): vLLM 0.23, torch 2.11, in a CUDA graph.
CHAIN_PEERS_US = {
    (8, 9, 1): (17.1, 22.0, 35.2, 79.1),
    (8, 9, 10): (21.7, 54.8, 160.0, 581.0),
    (8, 33, 1): (18.0, 30.2, 58.9, 156.0),
    (8, 33, 10): (34.0, 110.0, 352.0, 1596.0),
    (64, 9, 1): (21.0, 42.0, 87.0, 261.0),
}
PEER_PREFIXES = (2**10, 2**13, 2**15, 2**17)


def op(backend: str) -> Callable[..., Any]:
    """The op as a layer calls it: what the layers of a forward share is made outside."""

    def attend(q_latent, q_rope, lengths, ancestors, shared, cache):
        return tree_attention(q_latent, q_rope, cache, lengths, ancestors, scale=SCALE, backend=backend, shared=shared)

    return attend


def arguments(data: Data, case: Case, config: Config | None, backend: str) -> tuple[tuple, list[tuple]]:
    """(shared, inputs) of `timing.measure`: one input per cache."""
    make = jax.jit(
        functools.partial(
            plan,
            q=case.tokens,
            heads=case.heads,
            cache_rows=case.cache_rows,
            rank=RANK,
            rope=ROPE,
            dtype=data.q_latent.dtype,
            cache_dtype=data.caches[0].dtype,
            backend=backend,
            config=config,
        )
    )
    shared = make(data.lengths, data.ancestors)
    return (data.q_latent, data.q_rope, data.lengths, data.ancestors, shared), [(c,) for c in data.caches]


_reference = jax.jit(reference, static_argnames="scale")


def error(data: Data, out: jax.Array, copy: int = -1) -> float:
    """Largest relative norm of the error of a (token, head) row, over the last stream of a cache, against float32."""
    last = slice(-1, None)
    arrays = (data.q_latent[last], data.q_rope[last], data.caches[copy][last], data.lengths[last], data.ancestors[last])
    expected = _reference(*arrays, scale=SCALE)
    off = jnp.linalg.norm(out[last].astype(jnp.float32) - expected, axis=-1)
    return float(jnp.max(off / jnp.linalg.norm(expected, axis=-1)))


def measured(case: Case, timed: timing.Timing) -> dict[str, Any]:
    us = timed.min_us
    return {
        **{name: getattr(case, name) for name in ("heads", "tokens", "streams", "prefix")},
        "us": round(us, 2),
        "median_us": round(timed.median_us, 2),
        "read_ceiling_fraction": round(case.cache_bytes / us / 1e3 / timing.read_ceiling(), 3),
        "matmul_peak_fraction": round(case.flops / us / 1e6 / timing.matmul_peak(), 3),
    }


def peer_us(case: Case) -> float | None:
    row = CHAIN_PEERS_US.get((case.heads, case.tokens + 1, case.streams))
    return row[PEER_PREFIXES.index(case.prefix)] if row and case.prefix in PEER_PREFIXES else None


def study_program(folder: Path, case: Case, data: Data) -> tuple[Callable[..., Any], tuple, list[tuple]]:
    """The kernel of an independent study (module `ta`), with the settings that were best there, on the same data."""
    sys.path.insert(0, str(folder))
    ta = importlib.import_module("ta")
    rows = case.heads * case.tokens
    config: dict[str, Any] = dict(BM=64, BN=64, num_stages=2, num_warps=8, var="if2")
    if case.prefix <= 2**13 and case.streams == 1:
        config["var"] = "if2one"
    if rows <= 16:
        config = dict(BM=16, BN=32, num_stages=2, num_warps=4, var="two")
    programs = 264 if rows <= 16 else max(132 // -(-rows // 64), 1)
    blocks = case.streams * -(-(case.prefix + case.tokens) // config["BN"])
    table, segments = ta.schedule(
        np.full(case.streams, case.prefix), case.tokens, config["BN"], min(max(programs, case.streams), blocks)
    )
    bits = np.asarray(data.ancestors)
    words = np.zeros((*bits.shape[:2], -(-case.tokens // 32)), np.uint32)
    for j in range(case.tokens):
        words[:, :, j // 32] |= bits[:, :, j].astype(np.uint32) << np.uint32(j % 32)
    query = jnp.concatenate([data.q_latent, data.q_rope], axis=-1).reshape(case.streams, rows, -1)
    attend = functools.partial(ta.attn, T=case.tokens, H=case.heads, **config)

    def study(start, table, segments, lengths, words, query, cache):
        out, _ = attend(start, table, segments, lengths, words, query, cache)
        return out.reshape(case.streams, case.tokens, case.heads, RANK)

    shared = (jnp.zeros(1, jnp.int32), table, segments, data.lengths, words.view(np.int32), query)
    return study, tuple(map(jnp.asarray, shared)), [(c,) for c in data.caches]


Program = tuple[Callable[..., Any], tuple, list[tuple]]


def compiled(f: Callable[..., Any], shared: tuple, inputs: list[tuple]) -> Program:
    return timing.several_calls(f).lower(shared, inputs).compile(), shared, inputs


def ours(case: Case, data: Data, config: Config | None, backend: str, most_inputs: int | None = None) -> Program:
    shared, inputs = arguments(data, case, config, backend)
    return compiled(op(backend), shared, inputs[:most_inputs])


def run(cases: tuple[Case, ...], out: Path, study: Path | None, seconds: float, threads: int, backend: str) -> None:
    deadline = time.monotonic() + seconds
    seed = int.from_bytes(os.urandom(3), "little")
    header = {
        **timing.device_facts(),
        "read_ceiling_gb_s": round(timing.read_ceiling(), 1),
        "matmul_peak_tflop_s": round(timing.matmul_peak(), 1),
        "cache": "bfloat16",
    }
    rows: list[dict[str, Any]] = []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        waiting = []
        for case in cases:
            data = random_data(case, seed)
            programs = {"us": pool.submit(ours, case, data, None, backend)}
            if study is not None:
                programs["study_us"] = pool.submit(lambda c, d: compiled(*study_program(study, c, d)), case, data)
            waiting.append((case, data, programs))
        concurrent.futures.wait(
            [p for *_, programs in waiting for p in programs.values()]
        )  # a busy host delays launches
        for case, data, programs in waiting:
            if time.monotonic() > deadline:
                print(f"out of time before {case}", flush=True)
                break
            program, shared, inputs = programs["us"].result()
            row = measured(case, timing.measure(program, shared, inputs))
            row["error"] = error(data, program(shared, inputs)[-1])
            row["chain_peer_us"] = peer_us(case)
            if "study_us" in programs:
                program, shared, inputs = programs["study_us"].result()
                row["study_us"] = round(timing.measure(program, shared, inputs).min_us, 2)
                row["study_error"] = error(data, program(shared, inputs)[-1])
            rows.append(row)
            print(row, flush=True)
            timing.write_rows(out, rows, **header)


def main(argv: list[str] | None = None, prog: str = "python -m pallas_kernels.tree_attention.bench") -> None:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file, written after every row")
    parser.add_argument("--study", type=Path, help="folder of a yardstick with a module ta, timed beside ours")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no measurement after this long")
    parser.add_argument("--threads", type=int, default=16, help="programs compiled at once")
    parser.add_argument("--largest-prefix", type=int, default=2**17)
    args = parser.parse_args(argv)
    cases = tuple(case for case in CASES if case.prefix <= args.largest_prefix)
    run(cases, args.out, args.study, args.seconds, args.threads, "triton")


if __name__ == "__main__":
    main()
