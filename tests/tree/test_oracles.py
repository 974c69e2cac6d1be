"""Trees and acceptance against the reference DDTree heap (golden data), bit for bit."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdjax import tree as ddtree
from tests.oracles import find, load

pytestmark = pytest.mark.newest

BUDGETS = (1, 4, 7, 8, 16, 22, 32, 64)
TABLES = [
    "ddtree_table_full_mantissa_alternating",
    "ddtree_table_full_mantissa_same",
    "ddtree_table_one_ulp_apart",
    "ddtree_table_tiny_values",
]
LOGITS = [
    "ddtree_all_equal",
    "ddtree_bf16_ties",
    "ddtree_equal_depths",
    "ddtree_equal_depths_bf16",
    "ddtree_integer_logits",
    "ddtree_large_offset",
    "ddtree_onehot_ties",
    "ddtree_peaky",
    "ddtree_permuted_depths",
    "ddtree_single_depth",
    "ddtree_small_vocab",
    "ddtree_smooth",
    "ddtree_vocab163840",
]

select = jax.jit(ddtree.select, static_argnums=3)
build = jax.jit(ddtree.build, static_argnums=2)
accept = jax.jit(ddtree.accept, static_argnums=2)


def slot(tree: ddtree.Tree, s: int) -> ddtree.Tree:
    return jax.tree.map(lambda x: x[s : s + 1], tree)


@functools.cache
def trees(compiled: int) -> dict[tuple[str, int], ddtree.Tree]:
    """Trees of all cases from one program per table shape: cases and budgets up to `compiled` are slots of a batch."""
    found = {}
    by_shape = {}
    for name in TABLES + LOGITS:
        by_shape.setdefault(load(name).inputs["lp"].shape, []).append(name)
    for (_, top), names in by_shape.items():
        asked = [(name, budget) for name in names for budget in BUDGETS if budget <= compiled]
        lp, ids = (
            jnp.asarray(np.stack([load(name).inputs[key][:, : min(compiled, top)] for name, _ in asked]))
            for key in ("lp", "ids")
        )
        budgets = jnp.array([budget for _, budget in asked], jnp.int32)
        batch = select(lp, ids, jnp.full_like(budgets, 5), compiled, budgets)
        found |= {key: slot(batch, s) for s, key in enumerate(asked)}
    return found


def compare(tree: ddtree.Tree, case, budget: int) -> None:
    expected = {key.removeprefix(f"b{budget}."): value for key, value in case.expected.items()}
    n = len(expected["tokens"])
    assert int(tree.n_valid[0]) == n + 1
    np.testing.assert_array_equal(tree.tokens[0, 1 : n + 1], expected["tokens"])
    np.testing.assert_array_equal(tree.depths[0, 1 : n + 1], expected["depths"])
    np.testing.assert_array_equal(tree.parents[0, : n + 1], expected["parents"])
    np.testing.assert_array_equal(tree.ancestors[0, : n + 1, : n + 1], expected["visibility"].astype(bool))
    start = expected["position_ids"][:1]
    np.testing.assert_array_equal(tree.positions(jnp.asarray(start, jnp.int32))[0, : n + 1], expected["position_ids"])
    np.testing.assert_allclose(tree.scores[0, 1 : n + 1], expected["scores_f64"], rtol=1e-6, atol=1e-6)
    assert not np.any(tree.tokens[0, n + 1 :])


@pytest.mark.parametrize("compiled", [16, 64])
@pytest.mark.parametrize("name", TABLES + LOGITS)
def test_tree_equals_the_reference_heap_on_the_given_table(name, compiled):
    for budget in (b for b in BUDGETS if b <= compiled):
        compare(trees(compiled)[name, budget], load(name), budget)


def test_acceptance_equals_the_reference_walk():
    slots, posteriors, expected = [], [], []
    for (name, budget), tree in trees(64).items():
        for item in load(name).meta["acceptance"][str(budget)]:
            slots.append(tree)
            posteriors.append(item["posterior"] + [-1] * (65 - len(item["posterior"])))
            expected.append((item["accepted_indices"], item["bonus_token"]))
    batch = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *slots)
    result = jax.device_get(accept(batch, jnp.array(posteriors, jnp.int32), 7))
    got = [(r[:n].tolist(), b) for r, n, b in zip(result.rows, result.n_accepted, result.bonus.tolist(), strict=True)]
    assert got == expected
    assert max(len(rows) for rows, _ in got) == 8


@pytest.mark.parametrize("vocab", [1000, 163840])
def test_marginals_and_tree_from_logits(vocab):
    names = [n for n in LOGITS if load(n).inputs["draft_logits"].shape == (7, vocab)]
    logits = np.stack([load(name).inputs["draft_logits"].astype(np.float32) for name in names])
    lp, ids = jax.jit(ddtree.marginals, static_argnums=1)(jnp.asarray(logits), 64)
    batch = build(jnp.asarray(logits), jnp.full((len(names),), 5, jnp.int32), 16)
    for s, name in enumerate(names):
        case = load(name)
        np.testing.assert_array_equal(ids[s], case.inputs["ids"])
        one_ulp = np.spacing(np.abs(logits[s]).max() + np.float32(20))
        np.testing.assert_allclose(lp[s], case.inputs["lp"], rtol=0, atol=one_ulp)
        if name != "ddtree_large_offset":  # there one ulp of logsumexp is coarser than the gaps between depths
            compare(slot(batch, s), case, 16)


def test_float32_sums_would_fail_on_the_full_mantissa_tables():
    """The tables have teeth: they list the budgets where summing in float32 gives another tree."""
    for name in TABLES[:2]:
        assert load(name).meta["budgets_where_float32_sums_give_another_tree"]


def test_budget_zero_is_the_root_alone():
    expected = json.loads((find("ddtree_budget0") / "expected.json").read_text())
    logits, root = jnp.zeros((1, 7, 11), jnp.float32), jnp.array([5], jnp.int32)
    for result in (ddtree.build(logits, root, 0), ddtree.build(logits[:, :0], root, 4), ddtree.root_only(root)):
        assert result.n_valid.tolist() == [1]
        assert result.parents[0, :1].tolist() == expected["parents"]
        assert result.ancestors[0, :1, :1].tolist() == [[bool(v) for v in row] for row in expected["visibility"]]
        for item in expected["acceptance"]:
            posterior = jnp.full(result.tokens.shape, item["posterior"][0], jnp.int32)
            accepted = ddtree.accept(result, posterior, 7)
            assert accepted.rows[0, : int(accepted.n_accepted[0])].tolist() == item["accepted_indices"]
            assert int(accepted.bonus[0]) == item["bonus_token"]
