"""One suite for every backend and weight format of the experts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.int4 import dequantize
from pallas_kernels.int4_experts import (
    PackedExperts,
    dense_experts,
    fused_experts,
    int4_experts,
    int4_matmul,
    reference,
    tile_experts,
    tile_matrix,
)
from pallas_kernels.int4_experts.align import align
from pallas_kernels.int4_experts.config import Config, Ring, Rings, Tile
from pallas_kernels.int4_experts.sort import gather, weighted_sum
from pallas_kernels.int4_experts.workload import random_experts
from tests.pallas_kernels.backends import BACKENDS
from tests.tolerances import EXPERTS_BFLOAT16, EXPERTS_FLOAT32, PACKED_MATMUL, RELATIVE_INT4

PLAIN = ["xla"]
GROUP = 32
HIDDEN, INNER = 128, 64


F32 = jnp.dtype("float32")


def matrices(rng: np.random.Generator, experts: int):
    """(packed, scale) of gate, up and down, all 16 codes in use."""
    out = []
    for rows, columns in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)):
        packed = rng.integers(0, 2**32, (experts, rows, columns // 8), dtype=np.uint32)
        scale = rng.uniform(0.005, 0.02, (experts, rows, columns // GROUP)).astype(ml_dtypes.bfloat16)
        out.append((jnp.asarray(packed), jnp.asarray(scale)))
    return out


def dense(packed_and_scale, dtype):
    packed, scale = packed_and_scale
    return dequantize(packed, scale, columns=packed.shape[-1] * 8, group_size=GROUP, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("form", "backend"))
def run(x, indices, weights, quantised, form, backend):
    if form == "int4":
        arrays = [a for pair in quantised for a in pair]
        return int4_experts(x, indices, weights, PackedExperts(*arrays, GROUP), backend=backend)
    gate, up, down = (dense(pair, x.dtype) for pair in quantised)
    if form == "fused":
        arrays = jnp.concatenate([gate, up], axis=1), down, jnp.moveaxis(down, 1, 0).reshape(HIDDEN, -1)
        return fused_experts(x, indices, weights, *arrays, backend=backend)
    return dense_experts(x, indices, weights, gate, up, down, backend=backend)


def routing(rng, tokens, experts, top_k, pattern):
    if pattern == "elsewhere":  # on both sides of the range; token 0 has no expert here
        indices = np.stack([rng.permutation(experts + 4)[:top_k] - 2 for _ in range(tokens)])
        indices[0] = -1, experts
    elif pattern == "random":
        indices = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
    elif pattern == "one_set":  # every token wants the same experts: all others are empty
        indices = np.tile(rng.permutation(experts)[:top_k], (tokens, 1))
    else:  # last_expert: one group holds a row of every token, at the end of the table
        indices = np.stack([np.append(rng.permutation(experts - 1)[: top_k - 1], experts - 1) for _ in range(tokens)])
    weights = rng.uniform(0.1, 1.0, (tokens, top_k)).astype(np.float32)
    return jnp.asarray(indices, jnp.int32), jnp.asarray(weights)


def packed_experts(rng, experts, hidden, inner, group):
    arrays = []
    for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner)):
        arrays.append(jnp.asarray(rng.integers(0, 2**32, (experts, rows, columns // 8), dtype=np.uint32)))
        scale = rng.uniform(0.005, 0.02, (experts, rows, columns // group)).astype(ml_dtypes.bfloat16)
        arrays.append(jnp.asarray(scale))
    return PackedExperts(*arrays, group)


def dense_experts_of(packed):
    e, unpack = packed, functools.partial(dequantize, group_size=packed.group_size, dtype=F32)
    for words, scale in ((e.gate_packed, e.gate_scale), (e.up_packed, e.up_scale), (e.down_packed, e.down_scale)):
        yield unpack(words, scale, columns=words.shape[-1] * 8)


CONFIGS = [
    Config("row", "token", Tile(32, warps=2, splits=2), Tile(64, count=2)),
    Config("row", "group", Tile(64), Tile(16, warps=1, steps=2)),
    Config("scan", "token", Tile(64, count=2), Tile(32, warps=2)),
    Config("scan", "group", Tile(64, splits=2), Tile(64, steps=2, count=2)),
    Config("align", "group", Tile(64, 16, scale_on="weight"), Tile(64, 16, scale_on="weight")),
]


# few and many experts per token, token counts on both sides of each path
CASES = [
    (1, 16, 4, "random"),
    (3, 16, 4, "random"),
    (16, 16, 4, "random"),
    (16, 16, 4, "one_set"),
    (1, 40, 4, "random"),
    (7, 40, 4, "random"),
    (7, 40, 4, "one_set"),
    (70, 40, 4, "last_expert"),
    (130, 12, 1, "random"),
]


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("form", ["int4", "dense", "fused"])
@pytest.mark.parametrize("tokens,experts,top_k,pattern", CASES)
def test_matches_reference(backend, form, tokens, experts, top_k, pattern):
    rng = np.random.default_rng(tokens * 100 + experts)
    quantised = matrices(rng, experts)
    indices, weights = routing(rng, tokens, experts, top_k, pattern)
    x = jnp.asarray(rng.standard_normal((tokens, HIDDEN)), jnp.float32)
    expected = reference(x, indices, weights, *(dense(pair, F32) for pair in quantised))
    EXPERTS_FLOAT32.check(run(x, indices, weights, quantised, form, backend), expected)


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("form", ["int4", "dense", "fused"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_bfloat16(backend, form, tokens):
    rng = np.random.default_rng(7)
    quantised = matrices(rng, 16)
    indices, weights = routing(rng, tokens, 16, 4, "random")
    x = jnp.asarray(rng.standard_normal((tokens, HIDDEN)), jnp.bfloat16)
    y = run(x, indices, weights, quantised, form, backend)
    assert y.dtype == jnp.bfloat16
    expected = reference(x, indices, weights, *(dense(pair, F32) for pair in quantised))
    EXPERTS_BFLOAT16.check(np.asarray(y, np.float32), expected)


# few and many tokens per expert, one expert for all, groups and widths that are padded, and 1, 2, 4 planes per scale
KERNEL_CASES = [
    (1, 16, 4, "random", 32, 128, 64),
    (3, 6, 2, "one_set", 32, 320, 96),
    (20, 12, 3, "random", 64, 128, 128),
    (70, 5, 2, "last_expert", 128, 256, 128),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens,experts,top_k,pattern,group,hidden,inner", KERNEL_CASES)
def test_int4_of_every_backend(backend, tokens, experts, top_k, pattern, group, hidden, inner):
    rng = np.random.default_rng(tokens)
    check_int4(rng, tokens, experts, top_k, pattern, group, hidden, inner, backend)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.grouping}-{c.down_form}")
def test_int4_of_every_way_to_cut_the_work(backend, config):
    """A short last group, an expert without tokens, a token whose experts are all elsewhere."""
    rng = np.random.default_rng(8)
    check_int4(rng, 11, 5, 2, "elsewhere", 32, 256, 128, backend, config)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("n,experts,group", [(1, 3, 8), (40, 5, 8), (2500, 4, 16)])
@pytest.mark.parametrize("pattern", ["all", "one", "elsewhere"])
def test_groups_hold_every_assignment_once_and_in_order(backend, n, experts, group, pattern):
    rng = np.random.default_rng(n)
    low, high = {"all": (0, experts), "one": (experts - 1, experts), "elsewhere": (-2, experts + 2)}[pattern]
    experts_of = rng.integers(low, high, n).astype(np.int32)
    aligned = align(jnp.asarray(experts_of), experts, group, interpret=backend == "interpret")
    expert_of_group, places = map(np.asarray, aligned)
    places = places.reshape(len(expert_of_group), group)
    for expert in range(experts):
        mine = places[expert_of_group == expert].reshape(-1)
        expected = np.flatnonzero(experts_of == expert)
        np.testing.assert_array_equal(mine[: len(expected)], expected)
        assert (mine[len(expected) :] == -1).all() and len(mine) == -(-len(expected) // group) * group
    assert set(expert_of_group) <= {-1, *range(experts)}


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_wide_experts(backend):
    """Too wide for the activations of a down program to stay in registers."""
    rng = np.random.default_rng(9)
    config = Config("scan", "group", Tile(64, splits=2), Tile(64, count=2))
    check_int4(rng, 3, 3, 2, "random", 32, 128, 640, backend, config)


def check_int4(rng, tokens, experts, top_k, pattern, group, hidden, inner, backend, config=None):
    packed = packed_experts(rng, experts, hidden, inner, group)
    indices, weights = routing(rng, tokens, experts, top_k, pattern)
    x = jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.bfloat16)
    arrays = packed if backend == "xla" else tile_experts(packed)
    y = jax.jit(functools.partial(int4_experts, backend=backend, config=config))(x, indices, weights, arrays)
    assert y.dtype == jnp.bfloat16
    expected = np.asarray(reference(x, indices, weights, *dense_experts_of(packed)))
    off = np.linalg.norm(np.asarray(y, np.float32) - expected, axis=1)
    np.testing.assert_array_less(off, RELATIVE_INT4 * np.linalg.norm(expected, axis=1) + 1e-9)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("tokens,rows,columns,tile", [(1, 192, 320, Tile(32, splits=3)), (21, 64, 128, Tile(64, 16))])
def test_int4_matmul(backend, tokens, rows, columns, tile):
    rng = np.random.default_rng(rows)
    packed = jnp.asarray(rng.integers(0, 2**32, (rows, columns // 8), dtype=np.uint32))
    scale = jnp.asarray(rng.uniform(0.005, 0.02, (rows, columns // GROUP)).astype(ml_dtypes.bfloat16))
    x = jnp.asarray(rng.standard_normal((tokens, columns)), jnp.bfloat16)
    y = int4_matmul(x, tile_matrix(packed, scale, group_size=GROUP), backend=backend, tile=tile)
    w = dequantize(packed, scale, columns=columns, group_size=GROUP, dtype=F32)
    expected = np.asarray(jnp.matmul(x.astype(F32), w.T, precision="highest"))
    off = np.linalg.norm(np.asarray(y, np.float32) - expected, axis=1)
    np.testing.assert_array_less(off, RELATIVE_INT4 * np.linalg.norm(expected, axis=1))


@pytest.mark.parametrize("form", ["dense", "fused"])
def test_dense_weights_are_the_same_on_every_backend(form):
    rng = np.random.default_rng(4)
    quantised = matrices(rng, 6)
    indices, weights = routing(rng, 5, 6, 2, "random")
    x = jnp.asarray(rng.standard_normal((5, HIDDEN)), jnp.bfloat16)
    plain, kernels = (run(x, indices, weights, quantised, form, backend) for backend in ("xla", "triton"))
    np.testing.assert_array_equal(plain, kernels)


@pytest.mark.parametrize("backend", PLAIN)
def test_a_token_does_not_depend_on_its_neighbours(backend):
    rng = np.random.default_rng(3)
    quantised = matrices(rng, 40)
    indices, weights = routing(rng, 9, 40, 4, "random")
    x = jnp.asarray(rng.standard_normal((9, HIDDEN)), jnp.float32)
    together = run(x, indices, weights, quantised, "int4", backend)
    poisoned = run(x.at[1:].set(1e4), indices, weights, quantised, "int4", backend)
    EXPERTS_FLOAT32.check(poisoned[0], together[0])


def test_unsupported_requests_name_the_value():
    rng = np.random.default_rng(0)
    quantised = matrices(rng, 4)
    arrays = [a for pair in quantised for a in pair]
    indices, weights = routing(rng, 2, 4, 2, "random")
    x = jnp.zeros((2, HIDDEN), jnp.float32)
    packed = PackedExperts(*arrays, GROUP)
    with pytest.raises(NotImplementedError, match="tile_experts"):
        int4_experts(x.astype(jnp.bfloat16), indices, weights, packed, backend="interpret")
    with pytest.raises(NotImplementedError, match="PackedExperts, not TiledExperts"):
        int4_experts(x, indices, weights, tile_experts(packed), backend="xla")
    with pytest.raises(NotImplementedError, match="bfloat16 activations, not float32"):
        int4_experts(x, indices, weights, tile_experts(packed), backend="interpret")
    with pytest.raises(NotImplementedError, match="hidden=256 with experts tiled for 128"):
        wide = jnp.zeros((2, 256), jnp.bfloat16)
        int4_experts(wide, indices, weights, tile_experts(packed), backend="interpret")
    with pytest.raises(NotImplementedError, match="group_size=16 is not supported; supported: 32, 64, 128"):
        tile_experts(PackedExperts(*arrays, 16))
    with pytest.raises(NotImplementedError, match="inner=64 is not a multiple of group_size=128"):
        tile_experts(PackedExperts(*arrays, 128))
    with pytest.raises(NotImplementedError, match="backend='mosaic'"):
        int4_experts(x, indices, weights, PackedExperts(*arrays, GROUP), backend="mosaic")
    with pytest.raises(NotImplementedError, match="hidden=128.*group_size=48"):
        int4_experts(x, indices, weights, PackedExperts(*arrays, 48), backend="xla")
    gate, up, down = (dense(pair, F32) for pair in quantised)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        dense_experts(x.astype(jnp.bfloat16), indices, weights, gate, up, down, backend="xla")
    with pytest.raises(NotImplementedError, match="backend='triton9'"):
        dense_experts(x, indices, weights, gate, up, down, backend="triton9")


def test_dequantize_scale_edges(oracle):
    """Under jit, where a float32 -> bfloat16 -> float32 pair of casts could be optimised away."""
    o = oracle("pack_scale_edges")
    packed = jnp.asarray(o.inputs["weight_packed"].view(np.uint32))
    unpack = jax.jit(functools.partial(dequantize, columns=352, group_size=32, dtype=jnp.dtype("float32")))
    got = np.asarray(unpack(packed, jnp.asarray(o.inputs["weight_scale"])))
    expected = o.expected["weight_bf16"].astype(np.float32)
    # XLA flushes subnormal numbers to zero, the scales among them.
    scale = np.repeat(np.abs(o.inputs["weight_scale"].astype(np.float32)), 32, axis=1)
    flushed = (got == 0) & ((scale < 1.1754e-38) | (np.abs(expected) < 1.1754e-38))
    np.testing.assert_array_equal(np.where(flushed, expected, got), expected)


def test_dequantize_odd_widths(oracle):
    o = oracle("pack_codes")
    for case in [c for c in o.meta["cases"] if c["cols"] % 8]:
        name, rows, columns = f"c{case['index']}", case["rows"], case["cols"]
        packed = jnp.asarray(o.expected[f"{name}.packed"].view(np.uint32))
        scale = jnp.ones((rows, -(-columns // 32)), jnp.bfloat16)
        got = dequantize(packed, scale, columns=columns, group_size=32, dtype=jnp.dtype("float32"))
        np.testing.assert_array_equal(got, o.inputs[f"{name}.codes"])


def test_each_group_has_its_own_scale(oracle):
    o = oracle("pack_group_boundary")
    packed = jnp.asarray(o.inputs["weight_packed"].view(np.uint32))
    w = dequantize(
        packed, jnp.asarray(o.inputs["weight_scale"]), columns=160, group_size=32, dtype=jnp.dtype("float32")
    )
    np.testing.assert_array_equal(w, o.expected["weight_bf16"].astype(np.float32))
    y = jnp.matmul(jnp.asarray(o.inputs["x"]), w.T, precision="highest")
    PACKED_MATMUL.check(y, o.expected["y"])


@pytest.mark.parametrize("scheme", ["lib7.5", "max7"])
def test_dequantize_quantised_weights(oracle, scheme):
    o = oracle("pack_quantize")
    packed = jnp.asarray(o.expected[f"{scheme}.weight_packed"].view(np.uint32))
    scale = jnp.asarray(o.expected[f"{scheme}.weight_scale"])
    got = dequantize(packed, scale, columns=128, group_size=32, dtype=jnp.dtype("bfloat16"))
    np.testing.assert_array_equal(got, o.expected[f"{scheme}.dequant_bf16"])


@pytest.mark.parametrize("group", [8, 24])
def test_rows_go_into_the_order_of_their_experts_and_back(group):
    """Some experts are elsewhere, some have no token, and rows are wider than what a program takes at once."""
    tokens, top_k, here, width = 40, 3, 5, 1152
    rng = np.random.default_rng(0)
    indices = np.stack([rng.choice(8, top_k, replace=False) - 1 for _ in range(tokens)]).astype(np.int32)
    indices[indices == 3] = 7
    x = jnp.asarray(rng.standard_normal((tokens, width)), jnp.bfloat16)
    weights = jnp.asarray(rng.uniform(0.1, 1, (tokens, top_k)), jnp.float32)
    groups, places = align(jnp.asarray(indices.reshape(-1)), here, group, interpret=True)
    rows, position = gather(x, groups, places, top_k, interpret=True)
    for place, assignment in enumerate(np.asarray(places)):
        if groups[place // group] >= 0 and assignment >= 0:
            assert indices.flat[assignment] == groups[place // group] and position[assignment] == place
            np.testing.assert_array_equal(rows[place], x[assignment // top_k])
    total = weighted_sum(rows, position, jnp.asarray(indices), weights, here, interpret=True)
    counts = (indices >= 0) & (indices < here)
    expected = np.asarray(x, np.float64) * np.sum(np.asarray(weights, np.float64) * counts, axis=1, keepdims=True)
    np.testing.assert_allclose(np.asarray(total, np.float64), expected, rtol=1e-2, atol=1e-2)


def test_a_configuration_is_for_its_kernel():
    experts = random_experts(jax.random.key(0), 2, 128, 128)
    x, indices, weights = jnp.zeros((1, 128), jnp.bfloat16), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1))
    with pytest.raises(NotImplementedError, match="backend='interpret' cannot run config=Rings.*for the mosaic kernel"):
        int4_experts(x, indices, weights, experts, backend="interpret", config=Rings(8, Ring(), Ring()))
