"""The INT4 kernels without a GPU: lowering in every run, full compiles of all tuned choices where jax[cuda13] is."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot, timing
from pallas_kernels.int4_experts import int4_experts, int4_matmul, tile_matrix, tune
from pallas_kernels.int4_experts.bench import Shape
from pallas_kernels.int4_experts.config import Ring, Rings, Tile, choose, device_table, from_json
from pallas_kernels.int4_experts.workload import random_experts

EXPERTS, HIDDEN, TOP_K = 384, 7168, 8
needs_compiler = pytest.mark.skipif(not aot.available(), reason="full compiles need jax[cuda13]")
struct = jax.ShapeDtypeStruct


def arguments(tokens: int, inner: int, experts: int = EXPERTS, hidden: int = HIDDEN, top_k: int = TOP_K):
    tiled = jax.eval_shape(lambda key: random_experts(key, experts, hidden, inner), jax.random.key(0))
    x = struct((tokens, hidden), jnp.bfloat16)
    return x, struct((tokens, top_k), jnp.int32), struct((tokens, top_k), jnp.float32), tiled


def matmul_arguments(tokens: int, rows: int = 2048, columns: int = 7168):
    tile = functools.partial(tile_matrix, group_size=32)
    packed, scale = struct((rows, columns // 8), jnp.uint32), struct((rows, columns // 32), jnp.bfloat16)
    return struct((tokens, columns), jnp.bfloat16), jax.eval_shape(tile, packed, scale)


triton = functools.partial(int4_experts, backend="triton")


@pytest.mark.newest
@pytest.mark.parametrize("kind", aot.TARGETS)
@pytest.mark.parametrize("tokens,inner", [(1, 256), (128, 256), (1024, 256), (1, 2048), (33, 2048)])
def test_lowers(kind, tokens, inner):
    text = aot.lower_for(kind, triton, *arguments(tokens, inner))
    assert text.count("int4_experts_gate_up") and text.count("int4_experts_down")


@pytest.mark.parametrize("kind", aot.TARGETS)
def test_lowers_for_small_models_and_one_matrix(kind):
    aot.lower_for(kind, triton, *arguments(9, 128, experts=8, hidden=384, top_k=2))
    aot.lower_for(kind, functools.partial(int4_matmul, backend="triton"), *matmul_arguments(9))


def entries(kind: str):
    for inner, choices in device_table(kind)["experts"].items():
        for entry in choices:
            yield pytest.param(kind, int(inner), entry, id=f"{kind.split()[1]}-{inner}-{entry['tokens']}")


@needs_compiler
@pytest.mark.parametrize("kind,inner,entry", [e for kind in aot.TARGETS for e in entries(kind)])
def test_every_tuned_choice_fits_its_device(kind, inner, entry):
    """Shared memory beyond the device's limit fails here, not in lowering."""
    op = functools.partial(triton, config=from_json(entry))
    aot.compile_for(kind, op, *arguments(entry["tokens"], inner))


H200 = "NVIDIA H200"
mosaic = functools.partial(int4_experts, backend="mosaic")
RINGS = [
    Rings(16, Ring(stages=3), Ring(blocks=2, stages=3, steps=14, resident=True)),
    Rings(96, Ring(warpgroups=2, stages=3), Ring(warpgroups=2, count=2, stages=3)),
]


@pytest.mark.newest
@pytest.mark.parametrize("config", RINGS, ids=lambda c: str(c.tokens))
def test_mosaic_lowers(config):
    text = aot.lower_for(H200, functools.partial(mosaic, config=config), *arguments(330, 2048))
    assert "mosaic_gpu" in text and "int4_experts_gather" in text


@needs_compiler
@pytest.mark.parametrize("config", RINGS, ids=lambda c: str(c.tokens))
@pytest.mark.parametrize("inner", [256, 2048])
def test_mosaic_fits_the_device(config, inner):
    aot.compile_for(H200, functools.partial(mosaic, config=config), *arguments(330, inner))
    aot.compile_for(H200, functools.partial(mosaic, config=config), *arguments(9, 128, experts=8, hidden=384, top_k=2))


def test_mosaic_says_where_it_cannot_run():
    with pytest.raises(NotImplementedError, match="mosaic cannot run on this device: use 'triton'"):
        aot.lower_for("NVIDIA RTX PRO 6000 Blackwell Server Edition", mosaic, *arguments(330, 256))


@needs_compiler
@pytest.mark.parametrize("kind", aot.TARGETS)
def test_every_tuned_choice_for_one_matrix_fits_its_device(kind):
    for entry in device_table(kind)["matmul"]:
        op = functools.partial(int4_matmul, backend="triton", tile=Tile(**entry["tile"]))
        aot.compile_for(kind, op, *matmul_arguments(entry["tokens"]))


@needs_compiler
@pytest.mark.parametrize("inner,tokens,kernels", [(256, 1, 1), (256, 33, 1), (256, 128, 2), (2048, 1, 1)])
def test_the_tuner_times_nothing_but_the_half_of_a_layer(inner, tokens, kernels):
    """All calls are in the loop, and nothing copies their results."""
    kind = "NVIDIA H200"
    config = choose(device_table(kind), tokens, inner)
    for part in ("gate_up", "down"):
        op, experts, inputs = tune.part_of_layer(part, Shape(), inner, tokens, config, "triton")
        text = aot.compile_for(kind, timing.several_calls(op, 8), (experts,), [inputs] * 4).as_text()
        body = re.search(r"body=(%[\w.]+)", text or "")
        assert text and body
        loop = text.split(f"\n{body[1]} (")[1].split("\n}")[0]
        assert loop.count("custom-call(") == 4 * (kernels if part == "gate_up" else 1)
        assert " copy(" not in loop
