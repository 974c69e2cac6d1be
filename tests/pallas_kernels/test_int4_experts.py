"""One suite for every backend and weight format of the experts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.int4 import dequantize
from pallas_kernels.int4_experts import BACKENDS, dense_experts, fused_experts, int4_experts, reference
from tests.tolerances import EXPERTS_BFLOAT16, EXPERTS_FLOAT32, PACKED_MATMUL

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
        return int4_experts(x, indices, weights, *arrays, group_size=GROUP, backend=backend)
    gate, up, down = (dense(pair, x.dtype) for pair in quantised)
    if form == "fused":
        all_gate_up = jnp.concatenate([gate.reshape(-1, HIDDEN), up.reshape(-1, HIDDEN)]).T
        arrays = jnp.concatenate([gate, up], axis=1), all_gate_up, jnp.swapaxes(down, 1, 2)
        return fused_experts(x, indices, weights, *arrays, backend=backend)
    return dense_experts(x, indices, weights, gate, up, down, backend=backend)


def routing(rng, tokens, experts, top_k, pattern):
    if pattern == "random":
        indices = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
    elif pattern == "one_set":  # every token wants the same experts: all others are empty
        indices = np.tile(rng.permutation(experts)[:top_k], (tokens, 1))
    else:  # last_expert: one group holds a row of every token, at the end of the table
        indices = np.stack([np.append(rng.permutation(experts - 1)[: top_k - 1], experts - 1) for _ in range(tokens)])
    weights = rng.uniform(0.1, 1.0, (tokens, top_k)).astype(np.float32)
    return jnp.asarray(indices, jnp.int32), jnp.asarray(weights)


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["int4", "dense", "fused"])
@pytest.mark.parametrize("tokens,experts,top_k,pattern", CASES)
def test_matches_reference(backend, form, tokens, experts, top_k, pattern):
    rng = np.random.default_rng(tokens * 100 + experts)
    quantised = matrices(rng, experts)
    indices, weights = routing(rng, tokens, experts, top_k, pattern)
    x = jnp.asarray(rng.standard_normal((tokens, HIDDEN)), jnp.float32)
    expected = reference(x, indices, weights, *(dense(pair, F32) for pair in quantised))
    EXPERTS_FLOAT32.check(run(x, indices, weights, quantised, form, backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("backend", BACKENDS)
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
    with pytest.raises(NotImplementedError, match="backend='mosaic'"):
        int4_experts(x, indices, weights, *arrays, group_size=GROUP, backend="mosaic")
    with pytest.raises(NotImplementedError, match="hidden=128.*group_size=48"):
        int4_experts(x, indices, weights, *arrays, group_size=48, backend="xla")
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
