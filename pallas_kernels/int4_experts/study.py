"""Another implementation of the layer, timed beside ours: modules `v6`, `v7` of a folder, K2.6 shapes only."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import timing

if TYPE_CHECKING:
    from pallas_kernels.int4_experts.bench import Case


class Study:
    """Its best known configuration for each case, weights and scales random in its own layout."""

    def __init__(self, folder: str) -> None:
        sys.path.insert(0, folder)
        self._v6, self._v7 = (importlib.import_module(name) for name in ("v6", "v7"))
        self._arrays: dict[tuple[int, ...], tuple[jax.Array, jax.Array]] = {}

    def clear(self) -> None:
        """Let go of the weights."""
        self._arrays.clear()

    def compile(self, case: Case) -> Any:
        config = _config(case)
        shapes = [jax.eval_shape(functools.partial(_random, *spec)) for spec in self._specs(case, config)]
        inputs = self._inputs(case)
        return timing.several_calls(functools.partial(self._layer, config)).lower(tuple(shapes), inputs).compile()

    def measure(self, case: Case, program: Any, **options: int) -> float:
        """Microseconds."""
        specs = self._specs(case, _config(case))
        for spec in specs:
            if spec not in self._arrays:
                self._arrays[spec] = jax.jit(functools.partial(_random, *spec))()
        shared = tuple(self._arrays[spec] for spec in specs)
        return timing.measure(program, shared, self._inputs(case), **options).median_us

    def _specs(self, case: Case, config: dict[str, Any]) -> list[tuple[int, ...]]:
        e, h, n = case.shape.experts, case.shape.hidden, case.inner
        return [(e, h, n, 2, config["gate_up_rows"]), (e, n, h, 1, config["down_rows"])]

    def _inputs(self, case: Case) -> list[tuple[jax.Array, ...]]:
        return [(x, indices.reshape(-1), weights) for x, indices, weights in case.inputs]

    def _layer(self, config, gate_up, down, x, assignments, weights):
        top_k, tokens, rows = weights.shape[1], x.shape[0], assignments.size
        common = dict(R=rows, BM=config["tokens"], pre=config["align"])
        table = assignments
        if config["align"]:
            table = self._v6.align(assignments, common["BM"], min(rows, 384 + rows // common["BM"]))
        h = self._v7.gemm(x, *gate_up, table, topk=top_k, **common, **config["gate_up"])
        if h.ndim == 4 and config["sum_in_xla"]:
            gate, up = h.sum(0)
            h = (jax.nn.silu(gate) * up).astype(jnp.bfloat16)
        if config["narrow"]:
            y = self._v7.down(h, *down, table, **common, **config["down"])
        else:
            y = self._v7.gemm(h, *down, table, topk=1, **common, **config["down"])
        y = y.reshape(tokens, top_k, -1).astype(jnp.float32)
        return jnp.sum(y * weights[:, :, None], axis=1).astype(jnp.bfloat16)


def _random(experts: int, columns: int, rows: int, parts: int, block: int) -> tuple[jax.Array, jax.Array]:
    blocks = (experts, rows // block, columns // 128, parts)
    words = jax.random.bits(jax.random.key(0), (*blocks, block, 32), jnp.uint16).view(jnp.int16)
    scales = jax.random.uniform(jax.random.key(1), (*blocks, 2, block, 2), minval=0.005, maxval=0.02)
    return words, jax.lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.int32)


def _config(case: Case) -> dict[str, Any]:
    narrow = case.inner <= 256
    used = float(np.mean([len(np.unique(r)) for r in case.routings]))
    programs = case.inner // 64
    splits = max(1, min(14, round(6 * 132 / (used * programs))))
    if narrow:
        steps = 1 if case.tokens <= 2 else 2 if case.tokens == 4 else 4
        down = dict(num_warps=4, num_stages=3, C=steps)
    else:
        down = dict(num_warps=4, num_stages=3, Q=2)
    return {
        "tokens": 8,
        "align": case.tokens > 33,
        "narrow": narrow,
        "gate_up_rows": 64,
        "down_rows": 128 if narrow else 64,
        "gate_up": dict(num_warps=4, num_stages=3, splits=splits),
        "down": down,
        "sum_in_xla": splits > 4 or not narrow,
    }
