"""Whether a mesh computes what one device computes: the same random weights and caches on both."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from kdjax.bench import stages
from kdjax.bench.subject import SLACK, Subject
from kdjax.config import ONE_DEVICE
from kdjax.decode import loop
from kdjax.decode.drafting import Params
from kdjax.decode.state import DecodeState
from kdjax.errors import KdjaxError
from kdjax.evaluate.agreement import compare as compare_logits
from kdjax.plan.memory import Workload
from kdjax.sharding import place, shardings
from kdjax.tree import Tree
from pallas_kernels import timing


def compare(subject: Subject, workload: Workload, rounds: int) -> dict[str, Any]:
    """A verify forward and some rounds of `subject`, which is on a mesh, beside those of its first device with all of
    the model.

    Raises:
        KdjaxError: more rounds than the caches have room for.
    """
    assert subject.mesh is not None and subject.rank_of is None
    if rounds > (most := SLACK // (workload.budget + 1)):
        raise KdjaxError(f"--rounds {rounds} could fill the caches: at most {most} of {workload.budget + 1} tokens")
    one = alone(subject)
    params = one.params()
    if not workload.budget:
        params = params._replace(drafter=None)
    work = functools.partial(stages.make_work, one.program(workload.budget), workload.streams)
    tree = jax.jit(work)(jax.random.key(2)).tree
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for side in (one, subject):
        program, here, state = side.program(workload.budget), params, one.state(workload)
        if program.mesh is not None:
            here = place(params, shardings(program.param_specs(params), program.mesh))
            state = place(state, shardings(program.state_specs(state), program.mesh))
        nodes, count, running = side.on_devices((tree, jnp.int32(rounds), jnp.int32(1)))
        calls.append((functools.partial(_verify.lower, program), (here, state, nodes)))
        calls.append((functools.partial(loop.decode.lower, program), (here, state, count, running)))
    compiled = timing.compile_all([functools.partial(_compile, *call) for call in calls], threads=len(calls))
    found = []
    for program, (_, arguments) in zip(compiled, calls, strict=True):
        if isinstance(program, Exception):
            raise program
        out = program(*arguments)
        found.append(jax.device_get(out[1] if isinstance(out[1], loop.Report) else out))
    expected, one_report, ours, our_report = found
    return {**_forwards(expected, ours), **_rounds(one_report, our_report)}


def alone(subject: Subject) -> Subject:
    """The whole model of `subject`, which is on a mesh, on its first device."""
    assert subject.mesh is not None
    first, runtime = subject.mesh.devices.flat[:1].tolist(), subject.runtime
    return Subject.of(subject.pair, ONE_DEVICE, runtime.backend, first, rank=False, dtype=runtime.compute_dtype)


def _compile(lower: Any, arguments: tuple[Any, ...]) -> Any:
    return lower(*arguments).compile()


@functools.partial(jax.jit, static_argnames="program")
def _verify(program: loop.Program, params: Params, state: DecodeState, tree: Tree) -> tuple[jax.Array, jax.Array]:
    """Logits [slots, rows, vocab] and sorted experts [MoE layers, slots, rows, top_k] of a verify forward."""

    def run(params: Params, state: DecodeState, tree: Tree) -> tuple[jax.Array, jax.Array]:
        out, logits = loop.verify(program, params, state, tree)
        routing = jnp.stack(out.routing) if out.routing else jnp.zeros((0, *tree.tokens.shape, 0), jnp.int32)
        return logits, jnp.sort(routing, axis=-1)

    where = PartitionSpec(None, None, program.vocabulary_axes or None), PartitionSpec()
    return loop.on_mesh(program, run, params, state, tree, out_specs=lambda _: where)


def _forwards(one: tuple[np.ndarray, np.ndarray], mesh: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    """What differs. A choice between experts that are nearly as good may fall otherwise after other rounding; rows in
    which no layer chose otherwise are counted apart."""
    expected, found = (side[0].reshape(-1, side[0].shape[-1]).astype(np.float64) for side in (one, mesh))
    chosen = (one[1] == mesh[1]).all(-1)
    alike = chosen.all(0).reshape(-1)
    agreement = compare_logits(expected, found)
    return {
        "rows": len(alike),
        "rows_of_the_same_experts": int(alike.sum()),
        "choices": chosen.size,
        "same_choices": int(chosen.sum()),
        "logits_relative_difference": _difference(expected, found),
        "logits_relative_difference_same_experts": _difference(expected[alike], found[alike]),
        "top1_same": agreement["same"],
        "top1_margins_where_not": [parting["margins"] for parting in agreement["partings"]],
        "median_margin": float(np.median(agreement["margins"])),
        "kl_mean": agreement["kl_sum"] / agreement["tokens"],
    }


def _difference(expected: np.ndarray, found: np.ndarray) -> float | None:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected)) if len(expected) else None


def _rounds(one: loop.Report, mesh: loop.Report) -> dict[str, Any]:
    """Tokens of every stream until the first that differs, after which both decode other texts."""
    same = []
    for mine, other, emitted in zip(one.output, mesh.output, np.minimum(one.emitted, mesh.emitted), strict=True):
        differ = np.flatnonzero(mine[:emitted] != other[:emitted])
        same.append(int(differ[0]) if len(differ) else int(emitted))
    return {
        "rounds": [int(side.rounds.max()) for side in (one, mesh)],
        "emitted": [side.emitted.tolist() for side in (one, mesh)],
        "same_emitted": same,
        "accepted_by_depth": [side.accepted_by_depth.sum(0).tolist() for side in (one, mesh)],
    }
