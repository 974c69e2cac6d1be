import numpy as np
import pytest

from kdjax.reference import tree
from kdjax.reference.accept import accept
from tests import oracles, tolerances

BUILDERS = {"heap": tree.heap_tree, "ordered": tree.ordered_tree}


def check_tree(built, case, budget):
    expected = {k.removeprefix(f"b{budget}."): v for k, v in case.expected.items() if k.startswith(f"b{budget}.")}
    assert built.tokens == expected["tokens"].tolist()
    assert built.parents == expected["parents"].tolist()
    assert built.depths[1:] == expected["depths"].tolist()
    tolerances.TREE_SCORE.check(built.scores, expected["scores_f64"])
    np.testing.assert_array_equal(tree.visibility(built.parents), expected["visibility"].astype(bool))
    start = int(expected["position_ids"][0])
    np.testing.assert_array_equal(tree.position_ids(built, start), expected["position_ids"])


@pytest.mark.parametrize("name", oracles.DDTREE)
@pytest.mark.parametrize("builder", BUILDERS)
def test_trees_match_the_papers_heap(oracle, builder, name):
    case = oracle(name)
    for budget in oracles.BUDGETS:
        check_tree(BUILDERS[builder](case.inputs["lp"], case.inputs["ids"], budget), case, budget)


@pytest.mark.parametrize("name", oracles.DDTREE_LOGITS)
def test_marginals_match_the_papers_table(oracle, name):
    case = oracle(name)
    lp, ids = tree.marginals(case.inputs["draft_logits"], case.inputs["ids"].shape[1])
    np.testing.assert_array_equal(ids, case.inputs["ids"])
    ulp = np.spacing(np.abs(case.inputs["draft_logits"].astype(np.float32)).max() + np.float32(16))
    assert (np.abs(lp - case.inputs["lp"]) <= ulp).all()


@pytest.mark.parametrize("name", oracles.DDTREE)
def test_acceptance_matches_the_papers_walk(oracle, name):
    case = oracle(name)
    for budget in oracles.BUDGETS:
        tokens, parents = case.expected[f"b{budget}.tokens"].tolist(), case.expected[f"b{budget}.parents"].tolist()
        start = int(case.expected[f"b{budget}.position_ids"][0])
        for expected in case.meta["acceptance"][str(budget)]:
            walk = accept(tokens, parents, expected["posterior"])
            assert walk.rows == expected["accepted_indices"]
            assert [tokens[row - 1] for row in walk.rows[1:]] == expected["accepted_tokens_after_root"]
            assert walk.bonus == expected["bonus_token"]
            assert start + len(walk.rows) == expected["new_start"]


def test_budget_zero_is_a_root(oracle):
    case = oracle("ddtree_budget0")
    lp, ids = tree.marginals(np.zeros((7, 5), np.float32), 5)
    for build in BUILDERS.values():
        root = build(lp, ids, 0)
        assert (root.tokens, root.parents) == (case.meta["tokens"], case.meta["parents"])
        assert tree.visibility(root.parents).tolist() == [[True]]
    for expected in case.meta["acceptance"]:
        walk = accept([], [-1], expected["posterior"])
        assert (walk.rows, walk.bonus) == (expected["accepted_indices"], expected["bonus_token"])


@pytest.mark.parametrize(("depth", "budget", "count"), [(7, 8, 53), (7, 16, 285), (7, 32, 1379), (15, 16, 397)])
def test_candidate_sets_have_the_known_sizes(depth, budget, count):
    found = tree.candidates(depth, budget)
    assert len(found) == count
    assert found == sorted(set(found))


@pytest.mark.parametrize("seed", range(20))
def test_smaller_trees_are_prefixes_and_both_definitions_agree(seed):
    rng = np.random.default_rng(seed)
    depth, vocab = int(rng.integers(1, 8)), int(rng.integers(2, 40))
    logits = rng.standard_normal((depth, vocab)).astype(np.float32) * rng.choice([0.1, 1.0, 8.0])
    logits = np.round(logits * 4) / 4 if seed % 2 else logits
    lp, ids = tree.marginals(logits, 32)
    whole = tree.heap_tree(lp, ids, 32)
    for budget in (1, 5, 15, 32):
        part = tree.ordered_tree(lp, ids, budget)
        assert part.ranks == whole.ranks[:budget]
        assert part.parents == whole.parents[: budget + 1]
        assert all(part.depths[row] == part.depths[parent] + 1 for row, parent in enumerate(part.parents) if row)


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_rows_without_a_distribution_grow_no_nodes(build):
    good = np.array([2.0, 1.0, 0.0, -np.inf], np.float32)
    for bad in (np.full(4, np.nan, np.float32), np.full(4, -np.inf, np.float32)):
        assert build(*tree.marginals(np.stack([bad, good]), 4), 8).tokens == []
        assert build(*tree.marginals(np.stack([good, bad]), 4), 8).tokens == []
    assert sorted(build(*tree.marginals(good[None], 4), 8).tokens) == [0, 1, 2]  # no -inf token, though 4 would fit


def test_token_id_zero_is_a_token():
    logits = np.full((3, 6), -4.0, np.float32)
    logits[[0, 2], 0], logits[1, 3] = 4.0, 4.0
    built = tree.heap_tree(*tree.marginals(logits, 6), 3)
    assert built.tokens == [0, 3, 0]


def test_a_chain_is_one_path_of_argmaxes():
    logits = np.random.default_rng(0).standard_normal((7, 50)).astype(np.float32)
    built = tree.chain(logits)
    assert built.tokens == logits.argmax(-1).tolist()
    assert built.parents == list(range(-1, 7)) and built.depths == list(range(8))


def test_a_wrong_first_draft_is_rejected():
    assert accept([4], [-1, 0], [5, 9]).rows == [0]
    assert accept([4], [-1, 0], [4, 9]) == ([0, 1], 9)
