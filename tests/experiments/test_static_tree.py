"""The static tree: the shape follows the table, the tokens follow the drafter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import rounds, static_tree
from experiments.static_tree import StaticRanks, acceptance_by_rank
from kdjax import tree as ddtree
from kdjax.decode import DFlash
from tests.decode.models import DRAFTER, MODEL, RUNTIME

TABLE = ((0.6, 0.3), (0.9, 0.05), (0.5, 0.4))


@pytest.mark.parametrize("seed", range(3))
def test_shape_is_that_of_the_table_and_tokens_are_those_of_the_drafter(seed, monkeypatch):
    drafts = jnp.asarray(np.random.default_rng(seed).normal(size=(2, 3, MODEL.vocab_size)) * 3, jnp.float32)
    monkeypatch.setattr(DFlash, "propose", lambda *_: drafts)
    static = StaticRanks(DRAFTER, MODEL, RUNTIME, TABLE)
    tree = jax.jit(ddtree.build, static_argnums=2)(static.propose(None, None), jnp.zeros(2, jnp.int32), 6)
    # rank tuples by the product of their probabilities: 0 .6, 00 .54, 1 .3, 10 and 000 .27, 001 .216
    assert tree.depths[0].tolist() == [0, 1, 2, 1, 3, 2, 3]
    assert tree.parents[0].tolist() == [-1, 0, 1, 0, 2, 3, 2]
    order = np.argsort(-np.asarray(drafts), axis=-1)
    for slot in range(2):
        ranked = [(0, 0), (1, 0), (0, 1), (2, 0), (1, 0), (2, 1)]
        assert tree.tokens[slot, 1:].tolist() == [int(order[slot, d, r]) for d, r in ranked]


def test_ranks_count_where_the_parent_was_accepted(monkeypatch):
    parents = np.array([[-1, 0, 0, 1, 2, 1]])
    seen = rounds.Seen(
        tokens=np.zeros((1, 6), int),
        parents=parents,
        depths=np.array([[0, 1, 1, 2, 2, 2]]),
        scores=np.zeros((1, 6)),
        n_valid=np.array([6]),
        on_path=np.array([[True, False, True, False, True, False]]),
        routing=np.zeros((1, 1, 6, 2), int),
    )
    drafts = list(static_tree._drafts(seen))
    assert drafts == [(0, 0, False), (0, 1, True), (1, 0, True)]  # below node 1 nothing was tried
    monkeypatch.setattr(rounds, "observe", lambda *_: [(np.array([0]), seen)] * 40)
    table = np.array(acceptance_by_rank(None, [None], 3, 2))
    assert table.shape == (3, 2) and (np.diff(table, axis=1) < 0).all() and (table.sum(1) < 1).all()
    assert table[0] == pytest.approx([0.01, 0.01], abs=1e-3)  # rank 1 was accepted, but cannot pass rank 0
    assert table[1, 0] > 0.8
