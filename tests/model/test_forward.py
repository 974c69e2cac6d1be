"""Trees, slots, padding and positions of one forward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from kdjax.errors import KdjaxError
from kdjax.model import k2
from kdjax.model.cache import KVCache, commit
from kdjax.model.runtime import CPU_EXACT, Runtime
from tests.model.small import CONFIG, FLOAT32, forward, prefill, random_params
from tests.tolerances import SAME_MODEL_FLOAT32

PARAMS = random_params(CONFIG, FLOAT32)


def tree(parents):
    """Ancestor mask and depths of a tree given by parents (root -1)."""
    q = len(parents)
    mask, depth = np.eye(q, dtype=bool), np.zeros(q, np.int32)
    for i in range(1, q):
        mask[i] |= mask[parents[i]]
        depth[i] = depth[parents[i]] + 1
    return jnp.asarray(mask), jnp.asarray(depth)


def path(parents, node):
    out = []
    while node >= 0:
        out.append(node)
        node = parents[node]
    return out[::-1]


PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3, 0]
TREE_TOKENS = [7, 11, 12, 13, 14, 15, 16, 17, 18]
PROMPT = [3, 0, 44, 9, 60, 21, 5]


def verify(cache, tokens, parents, n_valid=None, run=forward, taps=()):
    mask, depth = tree(parents)
    return run(
        PARAMS, jnp.asarray([tokens], jnp.int32), cache.lengths[:, None] + depth[None, :], cache, mask[None], n_valid,
        taps=taps,
    )  # fmt: skip


def test_each_node_equals_a_fresh_prefill_of_its_path():
    cache, _ = prefill(PARAMS, [PROMPT])
    out = verify(cache, TREE_TOKENS, PARENTS)
    for node in range(len(PARENTS)):
        prompt = PROMPT + [TREE_TOKENS[n] for n in path(PARENTS, node)]
        _, hidden = prefill(PARAMS, [prompt])
        SAME_MODEL_FLOAT32.check(out.hidden[0, node], hidden[0, len(prompt) - 1], f"node {node}")


def test_commit_of_a_scattered_path_equals_a_prefill():
    """Nodes 0, 3 and 7 are not adjacent in the tree; after the commit the next forward must not notice."""
    parents = [-1, 0, 0, 0, 1, 2, 2, 3, 1]
    cache, _ = prefill(PARAMS, [PROMPT])
    out = verify(cache, TREE_TOKENS, parents)
    committed = commit(out.cache, jnp.asarray([[0, 3, 7, 0]], jnp.int32), jnp.asarray([3], jnp.int32))
    fresh, _ = prefill(PARAMS, [PROMPT + [TREE_TOKENS[n] for n in (0, 3, 7)]])
    assert committed.lengths.tolist() == fresh.lengths.tolist() == [len(PROMPT) + 3]
    n = len(PROMPT) + 3
    for layer in range(CONFIG.num_hidden_layers):
        SAME_MODEL_FLOAT32.check(committed.latent[layer][0, :n], fresh.latent[layer][0, :n])
    SAME_MODEL_FLOAT32.check(verify(committed, TREE_TOKENS, PARENTS).hidden, verify(fresh, TREE_TOKENS, PARENTS).hidden)


def test_batch_of_different_trees_and_lengths_equals_each_alone():
    prompts = [PROMPT, PROMPT[:3], PROMPT + PROMPT]
    trees = [PARENTS, [-1, 0, 1, 2], [-1, 0, 0, 0, 2, 4]]
    q = max(map(len, trees))
    cache, _ = prefill(PARAMS, prompts)
    masks, depths = zip(*(tree(p + [0] * (q - len(p))) for p in trees), strict=True)
    tokens = jnp.asarray([TREE_TOKENS[:q]] * 3, jnp.int32)
    n_valid = jnp.asarray([len(p) for p in trees], jnp.int32)
    out = forward(PARAMS, tokens, cache.lengths[:, None] + jnp.stack(depths), cache, jnp.stack(masks), n_valid)
    assert np.isfinite(out.hidden).all()
    for s, (prompt, parents) in enumerate(zip(prompts, trees, strict=True)):
        alone, _ = prefill(PARAMS, [prompt])
        expected = verify(alone, TREE_TOKENS[: len(parents)], parents)
        SAME_MODEL_FLOAT32.check(out.hidden[s, : len(parents)], expected.hidden[0], f"slot {s}")


def test_padding_influences_nothing():
    cache, _ = prefill(PARAMS, [PROMPT])
    mask, depth = tree(PARENTS)
    everyone = jnp.ones_like(mask)[None]  # even where the mask says that padding is seen
    n_valid = jnp.asarray([5], jnp.int32)
    positions = cache.lengths[:, None] + depth[None, :]

    def run(padding):
        tokens = jnp.asarray([TREE_TOKENS[:5] + [padding] * 4], jnp.int32)
        return forward(PARAMS, tokens, positions, cache, everyone, n_valid).hidden

    np.testing.assert_array_equal(run(1)[0, :5], run(59)[0, :5])
    assert np.isfinite(run(10**6)).all()  # padding may be any id


def test_jitted_equals_unjitted_and_positions_are_data():
    cache, _ = prefill(PARAMS, [PROMPT])
    mask, depth = tree(PARENTS)
    tokens = jnp.asarray([TREE_TOKENS], jnp.int32)
    good = cache.lengths[:, None] + depth[None, :]
    sequential = cache.lengths[:, None] + jnp.arange(len(PARENTS), dtype=jnp.int32)[None, :]
    plain = k2.forward(PARAMS, CONFIG, tokens, good, cache, ancestors=mask[None], runtime=FLOAT32)
    jitted = forward(PARAMS, tokens, good, cache, mask[None])
    SAME_MODEL_FLOAT32.check(jitted.hidden, plain.hidden)
    # The same compiled program must react to other positions: node 8 is a child of the root.
    other = forward(PARAMS, tokens, sequential, cache, mask[None])
    assert np.abs(other.hidden[0, 8] - jitted.hidden[0, 8]).max() > 1e-2


def test_swapped_siblings_give_swapped_outputs():
    cache, _ = prefill(PARAMS, [PROMPT])
    a = verify(cache, [7, 11, 12], [-1, 0, 0]).hidden
    b = verify(cache, [7, 12, 11], [-1, 0, 0]).hidden
    SAME_MODEL_FLOAT32.check(b[:, jnp.asarray([0, 2, 1])], a)
    assert np.abs(a[0, 1] - a[0, 2]).max() > 1e-2


def test_taps_come_in_the_given_order_and_do_not_change_the_result():
    cache, _ = prefill(PARAMS, [PROMPT])
    plain = verify(cache, TREE_TOKENS, PARENTS)
    tapped = verify(cache, TREE_TOKENS, PARENTS, taps=(1, 0, 1))
    assert plain.taps.shape == (1, 9, 0)
    d = CONFIG.hidden_size
    np.testing.assert_array_equal(tapped.taps[..., :d], tapped.taps[..., 2 * d :])
    first = verify(cache, TREE_TOKENS, PARENTS, taps=(0,))
    np.testing.assert_allclose(tapped.taps[..., d : 2 * d], first.taps, atol=1e-5)
    assert np.abs(tapped.taps[..., :d] - tapped.taps[..., d : 2 * d]).max() > 0.1
    np.testing.assert_allclose(plain.hidden, tapped.hidden, atol=1e-5)
    with pytest.raises(KdjaxError, match=r"tap layers \[2\] do not exist.*0 to 1"):
        verify(cache, TREE_TOKENS, PARENTS, taps=(2,))


@pytest.mark.parametrize("channel_scale", [1.0, 1e3])
def test_absorbed_equals_materialised(channel_scale):
    """One latent channel times 1000: quantised or reassociated absorption would show."""
    params = jax.tree.map(lambda leaf: leaf, PARAMS)
    for layer in params["layers"].values():
        norm = layer["self_attn"]["kv_a_layernorm"]["weight"]
        layer["self_attn"]["kv_a_layernorm"]["weight"] = norm.at[3].mul(channel_scale)
        kv_b = layer["self_attn"]["kv_b_proj"]["weight"]
        layer["self_attn"]["kv_b_proj"]["weight"] = kv_b.at[:, 3].divide(channel_scale)
    materialised = msgspec.structs.replace(FLOAT32, mla="materialised")
    mask, depth = tree(PARENTS)
    tokens, hidden = jnp.asarray([TREE_TOKENS], jnp.int32), {}
    for runtime in (FLOAT32, materialised):
        cache, _ = prefill(params, [PROMPT], runtime=runtime)
        positions = cache.lengths[:, None] + depth[None, :]
        hidden[runtime.mla] = forward(params, tokens, positions, cache, mask[None], runtime=runtime).hidden
    SAME_MODEL_FLOAT32.check(hidden["absorbed"], hidden["materialised"])


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_fused_layout_equals_the_checkpoint_layout(shared):
    """A prompt and a tree take all experts at once, a single token one by one; rows of the cache are the same too."""
    config = msgspec.structs.replace(CONFIG, n_shared_experts=shared, first_k_dense_replace=1)
    params = random_params(config, FLOAT32)
    fused = msgspec.structs.replace(FLOAT32, expert_weights="dequantized", layout="fused")
    mask, depth = tree(PARENTS)
    results = []
    for runtime in (FLOAT32, fused):
        p = k2.arrange(params, config, runtime)
        cache, prompt = prefill(p, [PROMPT], config=config, runtime=runtime)
        at = cache.lengths[:, None]
        tokens = jnp.asarray([TREE_TOKENS], jnp.int32)
        nodes = forward(p, tokens, at + depth[None, :], cache, mask[None], config=config, runtime=runtime)
        one = forward(p, tokens[:, :1], at, cache, config=config, runtime=runtime)
        results.append((prompt[:, : len(PROMPT)], nodes.hidden, one.hidden, *nodes.cache.latent))
    for ours, theirs in zip(*results, strict=True):
        SAME_MODEL_FLOAT32.check(ours, theirs)


def test_fused_layout_has_the_declared_params():
    fused = msgspec.structs.replace(FLOAT32, expert_weights="dequantized", layout="fused")
    made = k2.arrange(PARAMS, CONFIG, fused)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), made)
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), k2.abstract_params(CONFIG, fused))


@pytest.mark.parametrize(
    "field,value", [("compute_dtype", "bfloat16"), ("expert_weights", "packed"), ("mla", "materialised")]
)
def test_fused_layout_refuses_what_it_cannot_hold(field, value):
    with pytest.raises(KdjaxError, match=f"layout='fused' needs {field}='.*', not '{value}'"):
        Runtime(**(msgspec.structs.asdict(CPU_EXACT) | {field: value}))


def test_bfloat16_runs_and_stays_close():
    bf16 = Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16")
    params = jax.tree.map(lambda leaf, abstract: leaf.astype(abstract.dtype), PARAMS, k2.abstract_params(CONFIG, bf16))
    cache, hidden = prefill(params, [PROMPT], runtime=bf16)
    assert hidden.dtype == cache.latent[0].dtype == jnp.bfloat16
    _, exact = prefill(PARAMS, [PROMPT])
    error = np.abs(np.asarray(hidden, np.float32) - np.asarray(exact))
    assert np.median(error) < 0.05


def test_logits_are_float32_and_refuse_a_foreign_head():
    hidden = jnp.ones((1, 2, CONFIG.hidden_size))
    assert k2.logits(PARAMS, CONFIG, hidden, FLOAT32).dtype == jnp.float32
    other = msgspec.structs.replace(CONFIG, vocab_size=64)
    with pytest.raises(KdjaxError, match=r"lm_head.weight is \(61, 32\).*\(64, 32\)"):
        k2.logits(PARAMS, other, hidden, FLOAT32)


@pytest.mark.parametrize("field", ["compute_dtype", "cache_dtype", "backend", "expert_weights", "layout", "mla"])
def test_unknown_runtime_choice_is_named(field):
    with pytest.raises(KdjaxError, match=f"{field}='fast'"):
        Runtime(**({"compute_dtype": "float32", "cache_dtype": "float32"} | {field: "fast"}))


def test_forward_does_not_advance_lengths():
    cache, _ = prefill(PARAMS, [PROMPT])
    out = verify(cache, TREE_TOKENS, PARENTS)
    assert isinstance(out.cache, KVCache)
    assert out.cache.lengths.tolist() == [len(PROMPT)]


@pytest.mark.parametrize("runtime", [FLOAT32, CPU_EXACT], ids=["checkpoint", "fused"])
def test_layers_that_are_alike_are_lowered_once(runtime):
    deep = msgspec.structs.replace(CONFIG, num_hidden_layers=6)
    params = k2.abstract_params(deep, runtime)
    cache = jax.eval_shape(lambda: KVCache.empty(deep, 1, 64, 16, "float32"))
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    text = forward.lower(params, tokens, tokens, cache, config=deep, runtime=runtime).as_text()
    assert text.count("call @_layer") == 6
    assert text.count("func.func private @_layer") == 2  # the dense one, and that of the experts
