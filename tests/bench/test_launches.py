"""The kernels of a verify forward of K2.6, one of eight devices' share, compiled for GPUs that are not there."""

from __future__ import annotations

import functools
import pathlib

import jax
import numpy as np
import pytest

from kdjax.bench import stages
from kdjax.bench.subject import Subject
from kdjax.checkpoint.synth import shorten
from kdjax.config import Cluster, ModelPair, load
from kdjax.plan import Workload
from kdjax.sharding import shardings
from pallas_kernels import aot
from tests.xla import launches

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
PER_LAYER = 15
"""Three products around attention, attention and its merge, three kernels between them; two sums, which scale for the
product after them; two products of the shared expert, with the router in the first; choice, activation and norm; the
routed experts' two."""
OUTSIDE = 16
"""Embedding, rotation and the attention's plan, the last norm, logits, and what makes the stage a loop."""


def verify(layers: int) -> str:
    """HLO of a loop of verify forwards of 8 tokens."""
    pair, mesh = load(ModelPair, CONFIGS / "models/kimi-k2.6.toml"), load(Cluster, CONFIGS / "meshes/h200x8.toml").mesh
    target, drafter = shorten(pair.target, pair.drafter, layers)
    device = aot.devices("NVIDIA H200", 1)
    subject = Subject.of(ModelPair(target=target, drafter=drafter), mesh, "triton", device, rank=True)
    program = subject.program(7)
    assert program.mesh is not None
    place = functools.partial(shardings, mesh=program.mesh)

    def on_device(placed):
        where = place(placed.specs)
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), placed.own, where)

    params = on_device(subject.abstract_params())
    state = on_device(subject.abstract_state(Workload(context=4096, streams=1, budget=7)))
    work = jax.eval_shape(functools.partial(stages.make_work, program, 1), jax.random.key(0))
    traced = stages.repeat.trace(program, stages.verify, params, state, work, jax.ShapeDtypeStruct((), np.int32))
    return traced.lower(lowering_platforms=("cuda",)).compile().as_text() or ""


@pytest.mark.full
@pytest.mark.skipif(not aot.available(), reason="full compiles need jax[cuda13]")
def test_a_layer_is_few_kernels(monkeypatch):
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    found = launches(verify(4))
    *before, layer, last = ([one for one in found if f"/layer_{i}/" in one.scope] for i in range(4))
    assert len(layer) <= PER_LAYER
    # The sum of the last layer and the norm are one.
    assert len(last) == len(layer) - 1 and len(found) - sum(map(len, (*before, layer, last))) <= OUTSIDE
    # The weights that are side by side in a product are joined where it reads them.
    assert not [one for one in layer if one.written > 2**20 and one.operation != "custom-call"]
