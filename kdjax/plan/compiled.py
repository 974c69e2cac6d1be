"""The decode program of a mesh compiled for its GPUs on a machine that has none: what the compiler says it takes."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import jax
import numpy as np

from kdjax import drafter as dflash
from kdjax.config import Cluster, DecodeConfig, ModelPair
from kdjax.decode import loop
from kdjax.decode.drafting import DFlash, Params
from kdjax.errors import KdjaxError
from kdjax.model import k2
from kdjax.model.runtime import Backend, Runtime
from kdjax.plan.memory import Workload
from kdjax.sharding import make_mesh, shardings
from pallas_kernels import aot

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Bytes on one device as XLA accounts for them, and what compiling took.

    Attributes:
        target_weights, drafter_weights: arguments that are weights.
        state: arguments that are caches and counters, donated to the result.
        workspace: buffers that live while a call runs, and results that reuse no argument.
        collectives: exchanges per round, by kind.
        seconds: of tracing, lowering and compiling.
    """

    backend: str
    target_weights: int
    drafter_weights: int
    state: int
    workspace: int
    collectives: dict[str, int]
    seconds: dict[str, float]

    @property
    def total(self) -> int:
        """Bytes of weights, state and workspace."""
        return self.target_weights + self.drafter_weights + self.state + self.workspace


def compile_step(pair: ModelPair, cluster: Cluster, workload: Workload, backend: Backend) -> Compiled:
    """Compile the decode loop (draft, tree, verify, accept, commit) that a `Decoder` runs on this mesh.

    Raises:
        KdjaxError: jax[cuda13] is absent, the device kind is unknown, the mesh has other devices than one host's, or
            the program does not compile for it.
    """
    if cluster.device is None:
        raise KdjaxError("the mesh file has no [device]: add kind, memory_gb and read_gb_per_s")
    if not aot.available():
        raise KdjaxError("compiling needs the CUDA compiler: pip install 'kdjax[cuda13]' (no GPU is needed)")
    if (kind := cluster.device.kind) not in aot.TARGETS:
        raise KdjaxError(f"device kind {kind!r} has no compiler target: choose from {', '.join(aot.TARGETS)}")
    runtime = Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16", backend=backend, mesh=cluster.mesh)
    drafting = None
    abstract = Params(k2.abstract_params(pair.target, runtime))
    if workload.budget:
        if pair.drafter is None:
            raise KdjaxError(f"budget {workload.budget} needs a drafter: give one, or budget 0")
        drafting = DFlash(pair.drafter, pair.target, runtime)
        abstract = abstract._replace(drafter=dflash.abstract_params(pair.drafter, runtime))
    mode = "tree" if workload.budget else "autoregressive"
    mesh = make_mesh(cluster.mesh, aot.devices(kind, cluster.mesh.devices))
    program = loop.Program(pair.target, runtime, mode, workload.budget, DecodeConfig().sampling, drafting, mesh)
    state = jax.eval_shape(lambda: program.empty_state(workload.streams, workload.context))
    params = _placed(abstract, shardings(program.param_specs(abstract), mesh))
    state = _placed(state, shardings(program.state_specs(state), mesh))

    seconds, began = {}, time.perf_counter()

    def took(what: str) -> None:
        nonlocal began
        seconds[what], began = time.perf_counter() - began, time.perf_counter()

    rounds = jax.ShapeDtypeStruct((), np.int32)
    try:
        traced = loop.decode.trace(program, params, state, rounds, rounds)
        took("trace")
        lowered = traced.lower(lowering_platforms=("cuda",))
        took("lower")
        compiled = lowered.compile()
        took("compile")
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise KdjaxError(f"the decode step does not compile for {kind} with backend {backend}: {error}") from error
    used = compiled.memory_analysis()
    assert used is not None
    text = compiled.as_text() or ""
    return Compiled(
        backend=backend,
        target_weights=_bytes(params.target),
        drafter_weights=_bytes(params.drafter),
        state=_bytes(state),
        workspace=used.temp_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes,
        collectives={kind: n for kind in COLLECTIVES if (n := len(re.findall(rf" {kind}(?:-start)?\(", text)))},
        seconds=seconds,
    )


def _placed(tree: Any, where: Any) -> Any:
    return jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), tree, where)


def _bytes(tree: Any) -> int:
    """On one device."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )
