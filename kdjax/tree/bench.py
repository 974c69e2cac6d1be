"""Time of building trees from draft logits on this device, and whether they are those of the reference; writes JSON.

kdjax bench tree --out docs/results/tree_build_h200.json
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from kdjax.reference import tree as reference
from kdjax.tree import Tree, build
from kdjax.tree.backends import BACKENDS
from pallas_kernels import timing

DEPTH, VOCAB = 7, 163840
CASES = tuple((streams, budget) for budget in (31, 15, 63) for streams in (1, 10))
INPUTS = 6


def matches_reference(logits: np.ndarray, tree: Tree, slot: int, budget: int) -> bool:
    """Tokens, parents and depths of one slot. Equal scores that float32 rounds apart may differ: report, not assert."""
    expected = reference.heap_tree(*reference.marginals(logits, min(budget, logits.shape[-1])), budget)
    n = len(expected.tokens) + 1
    got = (tree.tokens[slot, 1:n], tree.parents[slot, :n], tree.depths[slot, :n])
    wanted = (expected.tokens, expected.parents, expected.depths)
    return all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))


def run(cases: tuple[tuple[int, int], ...], out: Path, depth: int, vocab: int, backend: str) -> None:
    rng = np.random.default_rng(int.from_bytes(os.urandom(3), "little"))
    rows = []
    for streams, budget in cases:
        # the spread of a drafter's logits; each input its own, so that L2 does not hold them
        drafts = [4 * rng.standard_normal((streams, depth, vocab)).astype(np.float32) for _ in range(INPUTS)]
        roots = jnp.zeros((streams,), jnp.int32)
        inputs = [(jnp.asarray(logits), roots) for logits in drafts]
        op = functools.partial(build, budget=budget, backend=backend)
        program = timing.several_calls(op).lower((), inputs).compile()
        timed = timing.measure(program, (), inputs)
        trees = program((), inputs)
        checked = [matches_reference(d[s], t, s, budget) for d, t in zip(drafts, trees, strict=True) for s in (0, -1)]
        row = {
            "streams": streams,
            "budget": budget,
            "us": round(timed.min_us, 2),
            "median_us": round(timed.median_us, 2),
        }
        rows.append({**row, "equal_to_reference": f"{sum(checked)} of {len(checked)}"})
        print(rows[-1], flush=True)
        timing.write_rows(out, rows, **timing.device_facts(), backend=backend, depth=depth, vocab=vocab)


def main(argv: list[str] | None = None, prog: str = "python -m kdjax.tree.bench") -> None:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file, written after every row")
    parser.add_argument("--backend", choices=BACKENDS, default="triton", help="default %(default)s, which needs a GPU")
    args = parser.parse_args(argv)
    run(CASES, args.out, DEPTH, VOCAB, args.backend)


if __name__ == "__main__":
    main()
