import msgspec
import numpy as np
import pytest

from kdjax.config import YarnConfig
from kdjax.reference import model
from tests import oracles, tolerances


def run(target, ids, **options):
    config, params = target
    ids = np.asarray(ids)
    return model.forward(params, config, ids, np.arange(len(ids)), model.empty_cache(config), **options)


@pytest.mark.parametrize("name", oracles.HF_K2)
@pytest.mark.parametrize("index", range(3))
def test_target_matches_transformers(oracle, target, name, index):
    config, params = target(name)
    prompt = oracles.prompts(oracle(name))[index]
    rows, expected = prompt.rows, prompt.expected
    out = run(target(name), prompt.input_ids)

    np.testing.assert_array_equal(params["embed_tokens"]["weight"][prompt.input_ids[rows]], expected["embed"])
    for layer, indices in prompt.by_layer("router_indices").items():
        routing = out.routing[layer]
        np.testing.assert_array_equal(np.sort(routing.experts), np.sort(indices), f"experts of layer {layer}")
        ours, theirs = np.argsort(routing.experts), np.argsort(indices)
        tolerances.ROUTER_WEIGHTS.check(
            np.take_along_axis(routing.weights, ours, -1),
            np.take_along_axis(expected[f"router_weights.{layer}"], theirs, -1),
        )
    for layer, router_logits in prompt.by_layer("router_logits").items():
        tolerances.ROUTER_LOGITS.check(out.routing[layer].logits, router_logits)
    for layer, residual in prompt.by_layer("residual").items():
        tolerances.TARGET_RESIDUAL.check(out.residual[layer][rows], residual, f"residual after layer {layer}")
    for layer, latent in prompt.by_layer("kv_latent").items():
        tolerances.TARGET_CACHE.check(out.cache[layer, :, : config.kv_lora_rank], latent)
    for layer, key in prompt.by_layer("k_pe_interleaved").items():
        tolerances.TARGET_CACHE.check(out.cache[layer, :, config.kv_lora_rank :], key)
    tolerances.TARGET_LOGITS.check(model.logits(params, out.hidden[rows]), expected["logits"])


@pytest.mark.parametrize("name", oracles.HF_K2)
@pytest.mark.parametrize("index", range(3))
def test_greedy_continuation_matches_transformers(oracle, target, name, index):
    """Teacher-forced: row i of greedy_logits must choose greedy token i."""
    prompt = oracles.prompts(oracle(name))[index]
    greedy = prompt.expected["greedy_tokens"]
    out = run(target(name), np.concatenate([prompt.input_ids, greedy[:-1]]))
    logits = model.logits(target(name)[1], out.hidden[len(prompt.input_ids) - 1 :])
    tolerances.TARGET_LOGITS.check(logits, prompt.expected["greedy_logits"])
    np.testing.assert_array_equal(logits.argmax(-1), greedy)


def test_float32_products_of_int4_match_their_own_golden_set(oracle, target):
    case = oracle("hf_k2_b")
    kept = oracles.load_file(case.path / "expected_f32_dequant.safetensors")
    for prompt in oracles.prompts(case):
        out = run(target("hf_k2_b", "float32"), prompt.input_ids)
        logits = model.logits(target("hf_k2_b", "float32")[1], out.hidden[prompt.rows])
        tolerances.TARGET_LOGITS.check(logits, kept[f"{prompt.name}.logits"])
        for layer, routing in out.routing.items():
            np.testing.assert_array_equal(np.sort(routing.experts), kept[f"{prompt.name}.router_index_sets.{layer}"])
            if (residual := kept.get(f"{prompt.name}.residual.{layer}")) is not None:
                tolerances.TARGET_RESIDUAL.check(out.residual[layer][prompt.rows], residual)


def test_latent_norms_have_their_own_epsilon(oracle, target):
    """Small latents: rms_norm_eps in their place moves the logits by whole units."""
    config, params = target("hf_k2_b")
    prompt = oracles.prompts(oracle("hf_k2_b"))[0]
    wrong = msgspec.structs.replace(config, latent_norm_eps=1e-5)
    out = run((wrong, params), prompt.input_ids)
    assert np.abs(model.logits(params, out.hidden[prompt.rows]) - prompt.expected["logits"]).max() > 1.0


@pytest.mark.parametrize("spike", [1.0, 1e3])
def test_absorbed_and_materialised_attention_agree(oracle, target, spike):
    """Also with one latent channel a thousand times larger than the rest."""
    config, params = target("hf_k2_a")
    layers = {i: dict(layer, self_attn=dict(layer["self_attn"])) for i, layer in params["layers"].items()}
    for layer in layers.values():
        weight = layer["self_attn"]["kv_a_layernorm"]["weight"].copy()
        weight[5] *= spike
        layer["self_attn"]["kv_a_layernorm"] = {"weight": weight}
    spiked = config, dict(params, layers=layers)
    ids = oracles.prompts(oracle("hf_k2_a"))[0].input_ids
    absorbed, materialised = (run(spiked, ids, attention=form).residual for form in ("absorbed", "materialised"))
    scale = np.abs(materialised).max()
    tolerances.ABSORBED_FLOAT64.check(absorbed / scale, materialised / scale)


def test_a_tree_forward_equals_one_plain_forward_per_path(oracle, target):
    """Rows must not see siblings: every root-to-leaf path of a branching tree is compared with a chain of its own."""
    config, params = target("hf_k2_a")
    ids = oracles.prompts(oracle("hf_k2_a"))[0].input_ids
    past = run(target("hf_k2_a"), ids).cache
    parents = [-1, 0, 0, 2, 1, 3, 3, 0]
    tokens, depths = np.array([7, 11, 11, 3, 0, 501, 4, 90]), np.array([0, 1, 1, 2, 2, 3, 3, 1])
    ancestors = np.eye(8, dtype=bool)
    for i, parent in enumerate(parents[1:], start=1):
        ancestors[i] |= ancestors[parent]
    verified = model.forward(params, config, tokens, len(ids) + depths, past, ancestors)
    for leaf in (4, 5, 6, 7):
        path = np.flatnonzero(ancestors[leaf])
        alone = run(target("hf_k2_a"), np.concatenate([ids, tokens[path]]))
        tolerances.ABSORBED_FLOAT64.check(verified.hidden[path], alone.hidden[len(ids) :])
        tolerances.ABSORBED_FLOAT64.check(verified.cache[:, len(ids) + path], alone.cache[:, len(ids) :])


@pytest.mark.parametrize("name", oracles.MOE_GATE)
def test_router_matches_transformers(oracle, name):
    case = oracle(name)
    top_k, scaling = case.meta["top_k"], case.meta["routed_scaling_factor"]
    logits, bias = case.inputs["router_logits"], case.inputs["e_score_correction_bias"]
    experts, weights = model.route(logits, bias, top_k, scaling)
    np.testing.assert_array_equal(np.sort(experts), np.sort(case.expected["indices"]))
    dense = np.zeros(logits.shape)
    np.put_along_axis(dense, experts, weights, -1)
    tolerances.GATE_WEIGHTS.check(dense, case.expected["dense_weights"])


@pytest.mark.parametrize("name", ["rope_target_tiny", "rope_target_k26"])
def test_softmax_scale_carries_yarns_temperature(oracle, target, name):
    case = oracle(name)
    theta, parameters = oracles.yarn_parameters(case)
    nope = {"rope_target_tiny": 32, "rope_target_k26": 128}[name]
    config = msgspec.structs.replace(
        target("hf_k2_a")[0],
        qk_nope_head_dim=nope,
        qk_rope_head_dim=case.meta["dim"],
        rope_theta=theta,
        rope_scaling=YarnConfig(**parameters),
    )
    assert model.softmax_scale(config) == pytest.approx(case.meta["softmax_scale"], rel=1e-9)


def test_equal_scores_choose_the_lowest_experts():
    experts, weights = model.route(np.zeros((1, 384)), np.full(384, 6.9), 8, 2.827)
    assert experts.tolist() == [list(range(8))]
    np.testing.assert_allclose(weights, 2.827 / 8)


def test_underflowing_affinities_stay_finite():
    _, weights = model.route(np.full((1, 384), -2000.0), np.full(384, 12.0), 8, 2.827)
    assert np.isfinite(weights).all()
