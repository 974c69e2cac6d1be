"""The router against transformers, and where it has failed in other implementations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdjax.config import ModelConfig
from kdjax.model import k2
from kdjax.model.norm import rms_norm
from kdjax.model.runtime import Runtime
from pallas_kernels import aot
from pallas_kernels.choose_experts import choose_and_activate, choose_experts
from tests.pallas_kernels.backends import BACKENDS
from tests.tolerances import EXPERTS_BFLOAT16, EXPERTS_FLOAT32, GATE_WEIGHTS

EPS = 1e-5
CASES = """moe_gate_exact_tie moe_gate_k26_random moe_gate_large_bias moe_gate_mixed_range moe_gate_near_ties
moe_gate_negative_scores moe_gate_saturated moe_gate_small_16_top4 moe_gate_underflow""".split()

choose = functools.partial(jax.jit, static_argnames=("top_k", "norm_topk_prob", "routed_scaling_factor", "backend"))(
    choose_experts
)


@pytest.fixture(params=BACKENDS)
def select(request):
    return functools.partial(choose, norm_topk_prob=True, backend=request.param)


def scatter(indices, weights, experts):
    dense = np.zeros((len(indices), experts), np.float32)
    np.put_along_axis(dense, np.asarray(indices), np.asarray(weights), axis=1)
    return dense


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(oracle, select, case):
    o = oracle(case)
    logits, bias = o.inputs["router_logits"], o.inputs["e_score_correction_bias"]
    indices, weights = select(
        jnp.asarray(logits),
        jnp.asarray(bias),
        top_k=o.meta["top_k"],
        routed_scaling_factor=o.meta["routed_scaling_factor"],
    )
    np.testing.assert_array_equal(np.sort(indices, axis=1), np.sort(o.expected["indices"], axis=1))
    GATE_WEIGHTS.check(scatter(indices, weights, logits.shape[1]), o.expected["dense_weights"])


def test_underflowed_sigmoids_stay_finite(select):
    """Logits of -200: every sigmoid is 0, a bias of 12 still selects, 0 / (0 + 1e-20) is 0 and not NaN."""
    indices, weights = select(jnp.full((3, 32), -200.0), jnp.full(32, 12.0), top_k=8, routed_scaling_factor=2.827)
    np.testing.assert_array_equal(weights, np.zeros((3, 8)))
    np.testing.assert_array_equal(indices, np.tile(np.arange(8), (3, 1)))


def test_bias_needs_float32(select):
    """Biases in steps of 0.001 around 6.9: in bfloat16 they collapse onto a few values and other experts win."""
    rng = np.random.default_rng(0)
    bias = rng.permutation(np.arange(6.817, 7.063, 0.001, dtype=np.float64)).astype(np.float32)
    logits = rng.normal(0, 0.02, (20, len(bias))).astype(np.float32)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64))) + bias
    expected = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :8], axis=1)
    got, _ = select(jnp.asarray(logits), jnp.asarray(bias), top_k=8, routed_scaling_factor=1.0)
    np.testing.assert_array_equal(np.sort(got, axis=1), expected)
    rounded = jnp.asarray(bias).astype(jnp.bfloat16).astype(jnp.float32)
    coarse, _ = select(jnp.asarray(logits), rounded, top_k=8, routed_scaling_factor=1.0)
    assert (np.sort(coarse, axis=1) != expected).any(axis=1).mean() > 0.9


def test_equal_scores_take_the_lowest_ids(select):
    indices, weights = select(jnp.zeros((4, 384)), jnp.zeros(384), top_k=8, routed_scaling_factor=2.827)
    np.testing.assert_array_equal(indices, np.tile(np.arange(8), (4, 1)))
    np.testing.assert_allclose(weights, 2.827 / 8, rtol=1e-6)


def test_bias_selects_but_does_not_weigh(select):
    logits = jnp.asarray([[2.0, 0.0, -1.0, -3.0]])
    bias = jnp.asarray([0.0, 0.0, 0.0, 5.0])
    indices, weights = select(logits, bias, top_k=2, routed_scaling_factor=1.0)
    assert indices.tolist() == [[3, 0]]
    s = 1 / (1 + np.exp(-np.asarray([-3.0, 2.0])))
    np.testing.assert_allclose(weights[0], s / s.sum(), rtol=1e-5)


def test_without_normalisation_weights_are_scaled_sigmoids(select):
    indices, weights = select(
        jnp.asarray([[1.0, -1.0, 0.5]]), jnp.zeros(3), top_k=2, norm_topk_prob=False, routed_scaling_factor=2.0
    )
    assert indices.tolist() == [[0, 2]]
    np.testing.assert_allclose(weights[0], 2.0 / (1 + np.exp(-np.asarray([1.0, 0.5]))), rtol=1e-6)


def test_partial_sums_and_columns_of_something_else(select):
    rng = np.random.default_rng(0)
    parts, bias = rng.normal(size=(4, 5, 20)).astype(np.float32), rng.normal(size=12).astype(np.float32)
    rule = dict(top_k=4, routed_scaling_factor=2.0)
    indices, weights = select(jnp.asarray(parts), jnp.asarray(bias), **rule)
    expected = select(jnp.asarray(parts.sum(0)[:, :12]), jnp.asarray(bias), **rule)
    np.testing.assert_array_equal(indices, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_choice_and_activation_in_one_kernel(dtype, backend):
    """300 columns: two programs, the second with fewer."""
    rng = np.random.default_rng(0)
    parts, bias = rng.normal(size=(2, 5, 12 + 600)).astype(np.float32), rng.normal(size=12).astype(np.float32)
    x, norm_weight = (jnp.asarray(rng.normal(size=size), dtype) for size in ((5, 40), 40))
    rule = dict(top_k=4, norm_topk_prob=True, routed_scaling_factor=2.0, backend=backend)
    indices, weights, activated, normed = jax.jit(functools.partial(choose_and_activate, eps=EPS, **rule))(
        jnp.asarray(parts), jnp.asarray(bias), x, norm_weight
    )
    product = parts.sum(0) / np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), axis=1, keepdims=True) + EPS)
    expected = choose(jnp.asarray(product, jnp.float32), jnp.asarray(bias), **rule)
    np.testing.assert_array_equal(indices, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=1e-5)
    gate, up = np.split(product[:, 12:], 2, axis=1)
    tolerance = EXPERTS_FLOAT32 if dtype == "float32" else EXPERTS_BFLOAT16
    tolerance.check(np.asarray(activated, np.float64), gate / (1 + np.exp(-gate)) * up)
    wide = rms_norm(x.astype(jnp.float32), norm_weight.astype(jnp.float32), EPS)
    tolerance.check(np.asarray(normed, np.float64), np.asarray(wide, np.float64))


def test_the_activation_needs_a_kernel():
    with pytest.raises(
        NotImplementedError, match="choose_and_activate: backend='xla' is not supported; supported: tri"
    ):
        choose_and_activate(
            jnp.zeros((1, 2, 8)), jnp.zeros(4), jnp.zeros((2, 8)), jnp.zeros(8), top_k=2, norm_topk_prob=True,
            routed_scaling_factor=1.0, eps=EPS, backend="xla",
        )  # fmt: skip


def test_bias_stays_float32_in_a_bfloat16_model():
    config = ModelConfig(
        vocab_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=1, q_lora_rank=8, kv_lora_rank=8,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, intermediate_size=16, moe_intermediate_size=16,
        n_routed_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    params = k2.abstract_params(config, Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16"))
    gate = params["layers"][1]["mlp"]["gate"]
    assert gate["e_score_correction_bias"].dtype == jnp.float32
    assert gate["weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", aot.TARGETS)
def test_kernel_lowers_for(kind):
    rule = dict(top_k=8, norm_topk_prob=True, routed_scaling_factor=2.827, backend="triton")
    text = aot.lower_for(
        kind, functools.partial(choose_experts, **rule), jax.ShapeDtypeStruct((9, 384), jnp.float32), jnp.zeros(384)
    )
    assert "choose_experts" in text
