"""Cost-aware budgets: the choice is the best one, the tree is the smaller tree, the tokens stay the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdjax import tree as ddtree
from kdjax.decode import CostAware, DecodeConfig, Decoder, Request, budgeting
from kdjax.errors import KdjaxError
from tests.decode.models import RUNTIME, drafter, target

WIDTHS = (0, 2, 5, 9)


SLOTS = 6
build = jax.jit(ddtree.build, static_argnums=2)


@functools.cache
def logits():
    """Of drafters from nearly flat to nearly certain."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(SLOTS, 5, 30)) * rng.uniform(0.5, 6, size=(SLOTS, 1, 1)), jnp.float32)


def trees(budgets=(9,) * SLOTS, budget=9):
    return build(logits(), jnp.zeros(SLOTS, jnp.int32), budget, jnp.asarray(budgets, jnp.int32))


@pytest.mark.parametrize(
    "seconds", [(1.0, 1.0, 1.0, 1.0), (1.0, 1.2, 1.4, 1.6), (1.0, 2.0, 4.0, 8.0), (1.0, 5.0, 5.1, 5.2)]
)
def test_choice_has_the_highest_rate(seconds):
    tree = trees()
    running = np.array([True, True, False, True, True, True])
    gain = np.cumsum(np.exp(np.asarray(tree.scores, np.float64)), 1)[:, list(WIDTHS)]
    rates = gain / np.array(seconds)

    budgets, index = budgeting.choose(CostAware(WIDTHS, seconds, "batch"), tree, jnp.asarray(running))
    assert int(index) == rates[running].sum(0).argmax()
    assert budgets.tolist() == [WIDTHS[int(index)]] * 6

    budgets, index = budgeting.choose(CostAware(WIDTHS, seconds, "stream"), tree, jnp.asarray(running))
    best = rates.argmax(1)
    assert np.asarray(budgets)[running].tolist() == [WIDTHS[i] for i in best[running]]
    assert int(index) == best[running].max()


def test_concave_costs_need_more_than_a_greedy_stop():
    """The first nodes cost more than they bring and later ones pay for them: a search that stops there stays at 0."""
    probabilities = jnp.array([[1.0, 0.5, *[0.4] * 8]] * SLOTS, jnp.float32)
    tree = trees()
    tree = dataclasses.replace(tree, scores=jnp.log(probabilities))
    _, index = budgeting.choose(CostAware(WIDTHS, (1.0, 2.5, 2.6, 2.7), "batch"), tree, jnp.ones(SLOTS, bool))
    rates = [1 / 1, 1.9 / 2.5, 3.1 / 2.6, 4.7 / 2.7]
    assert rates[1] < rates[0] < rates[2] and int(index) == int(np.argmax(rates)) == 3


def test_narrowed_tree_is_the_tree_of_the_smaller_budget():
    limits, wanted = np.array([9, 9, 4, 9, 9, 9]), np.array([5, 0, 5, 3, 5, 2])
    small = budgeting.narrow(trees(limits), jnp.asarray(wanted, jnp.int32), 5)
    smaller = trees(np.minimum(limits, wanted), 5)
    for name in ("tokens", "depths", "parents", "ancestors", "scores", "n_valid"):
        np.testing.assert_array_equal(getattr(small, name), getattr(smaller, name), name)


REQUESTS = [Request(prompt_ids=(5, 9, 31 + i), max_new_tokens=20 + i, seed=i) for i in range(3)]
SAMPLED = {"temperature": 0.9, "prefill_chunk": 16}


@pytest.fixture(scope="module")
def plain():
    config = DecodeConfig(mode="autoregressive", **SAMPLED)
    return Decoder(target(), None, config, RUNTIME, context=64).generate(REQUESTS)


@pytest.mark.parametrize("scope, widths", [("batch", (0, 9)), ("stream", (3, 9))])
def test_tokens_are_those_of_plain_decoding(plain, scope, widths):
    config = DecodeConfig(mode="tree", budget=9, **SAMPLED)
    policy = CostAware(widths, (1.0, 1.15), scope)
    aware = Decoder(target(), drafter(), config, RUNTIME, slots=2, context=64, policy=policy).generate(REQUESTS)
    assert [c.token_ids for c in aware] == [c.token_ids for c in plain]
    assert sum(c.statistics.rounds for c in aware) < sum(c.statistics.rounds for c in plain)


def test_no_cache_is_copied_for_the_choice():
    config = DecodeConfig(mode="tree", budget=9)
    policy = CostAware((3, 9), (1.0, 1.15))
    decoder = Decoder(target(), drafter(), config, RUNTIME, slots=2, context=64, policy=policy)
    state = decoder.empty(64)
    program = decoder.compiled(64, state).decode.as_text()
    caches = {x.shape for x in jax.tree.leaves((state.cache.latent, state.drafter))}
    shapes = [f"f32[{','.join(map(str, shape))}]" for shape in caches]
    assert all(f"{shape}{{" in program for shape in shapes)  # searched for as XLA writes them
    found = [
        line for line in program.splitlines() if " copy(" in line and any(f"= {shape}" in line for shape in shapes)
    ]
    assert not found


@pytest.mark.parametrize(
    "widths, seconds, scope, said",
    [
        ((), (), "batch", "must rise"),
        ((3, 1), (1.0, 1.0), "batch", "must rise"),
        ((0, 1), (1.0,), "batch", "one positive time for each"),
        ((0, 1), (1.0, 0.0), "batch", "one positive time for each"),
    ],
)
def test_bad_policies_are_refused(widths, seconds, scope, said):
    with pytest.raises(KdjaxError, match=said):
        CostAware(widths, seconds, scope)


def test_a_policy_needs_the_tree_of_its_widest_width():
    with pytest.raises(KdjaxError, match="widths end with 9, mode=tree has budget=7"):
        Decoder(target(), drafter(), DecodeConfig(budget=7), RUNTIME, policy=CostAware(WIDTHS, (1.0, 1.0, 1.0, 1.0)))
