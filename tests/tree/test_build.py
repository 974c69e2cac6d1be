"""The builder beyond the golden data: ties, padding, broken rows, prefixes, vocabulary shards."""

import heapq
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from kdjax import tree as ddtree
from kdjax.errors import KdjaxError

select = jax.jit(ddtree.select, static_argnums=3)
build = jax.jit(ddtree.build, static_argnums=2)
accept = jax.jit(ddtree.accept, static_argnums=2)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def heap(lp: np.ndarray, budget: int) -> list[tuple[int, ...]]:
    """The paper's best-first search with exact sums."""
    depth, top = lp.shape
    queue = [(-Fraction(float(lp[0, 0])), (0,))]
    chosen = []
    while queue and len(chosen) < budget:
        cost, ranks = heapq.heappop(queue)
        chosen.append(ranks)
        d, r = len(ranks) - 1, ranks[-1]
        if r + 1 < top:
            step = Fraction(float(lp[d, r])) - Fraction(float(lp[d, r + 1]))
            heapq.heappush(queue, (cost + step, (*ranks[:-1], r + 1)))
        if d + 1 < depth:
            heapq.heappush(queue, (cost - Fraction(float(lp[d + 1, 0])), (*ranks, 0)))
    return chosen


def node_ranks(tree: ddtree.Tree, slot: int, ids: np.ndarray) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for row in range(1, int(tree.n_valid[slot])):
        depth = int(tree.depths[slot, row])
        rank = ids[depth - 1].tolist().index(int(tree.tokens[slot, row]))
        found.append((*found[int(tree.parents[slot, row])], rank))
    return found[1:]


def random_tables(rng: np.random.Generator, slots: int, depth: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    kinds = [
        lambda: -rng.exponential(2.0, (depth, top)),
        lambda: np.broadcast_to(-rng.exponential(2.0, top), (depth, top)),  # equal depths: every permutation ties
        lambda: -rng.integers(0, 4, (depth, top)).astype(float),
        lambda: -rng.exponential(1.0, (depth, top)) * 10.0 ** rng.integers(-9, 2, (depth, 1)),
    ]
    lp = np.stack([-np.sort(-kinds[s % len(kinds)]().astype(np.float32), -1)[:, ::1] for s in range(slots)])
    ids = np.stack([[rng.permutation(1000)[:top] for _ in range(depth)] for _ in range(slots)]).astype(np.int32)
    return lp.astype(np.float32), ids


@pytest.mark.parametrize(("depth", "budget"), [(7, 15), (7, 64), (15, 31), (15, 64), (3, 64)])
def test_equals_the_exact_heap_on_tie_rich_tables(depth, budget):
    lp, ids = random_tables(np.random.default_rng(depth * budget), 12, depth, budget)
    tree = select(jnp.asarray(lp), jnp.asarray(ids), jnp.zeros(12, jnp.int32), budget)
    for slot in range(12):
        assert node_ranks(tree, slot, ids[slot]) == heap(lp[slot], budget)


def test_candidate_counts_are_those_of_the_domination_bound():
    for depth, budget, count in [(7, 8, 53), (7, 16, 285), (7, 32, 1379), (7, 64, 6005), (15, 64, 29934)]:
        assert len(ddtree.candidates(depth, budget, budget).ranks) == count
    with pytest.raises(KdjaxError, match="budget 2000 .* lower it"):
        ddtree.candidates(7, 2000, 2000)
    with pytest.raises(KdjaxError, match="draft depth 16 exceeds 15"):
        ddtree.candidates(16, 4, 4)


def test_smaller_budget_is_a_prefix_per_slot():
    logits = normal(0, 4, 7, 300) * 3
    roots = jnp.arange(4, dtype=jnp.int32)
    full = build(logits, roots, 32)
    limited = build(logits, roots, 32, jnp.array([0, 1, 9, 99], jnp.int32))
    assert limited.n_valid.tolist() == [1, 2, 10, 33]
    for slot, n in enumerate([1, 2, 10, 33]):
        for field in ("tokens", "depths", "parents"):
            np.testing.assert_array_equal(getattr(limited, field)[slot, :n], getattr(full, field)[slot, :n])
        np.testing.assert_array_equal(limited.ancestors[slot, :n, :n], full.ancestors[slot, :n, :n])
        np.testing.assert_array_equal(limited.ancestors[slot, n:], np.eye(33, dtype=bool)[n:])
    small = build(logits, roots, 9)
    np.testing.assert_array_equal(small.tokens[2], limited.tokens[2, :10])


def test_rows_are_in_tree_order_and_depth_is_parent_depth_plus_one():
    """Depth-2 nodes hang from parents in non-identity order when the second token of depth 1 is popped late."""
    logits = normal(3, 8, 7, 50) * 2
    tree = build(logits, jnp.zeros(8, jnp.int32), 22)
    parents, depths = np.asarray(tree.parents), np.asarray(tree.depths)
    assert any(np.any(np.diff(p[d == 2]) < 0) for p, d in zip(parents, depths, strict=True))
    for s in range(8):
        for row in range(1, 23):
            assert 0 <= parents[s, row] < row
            assert depths[s, row] == depths[s, parents[s, row]] + 1
            lineage = tree.ancestors[s, parents[s, row]].at[row].set(True)
            np.testing.assert_array_equal(tree.ancestors[s, row], lineage)


def test_token_zero_is_a_token_not_padding():
    logits = np.random.default_rng(1).normal(size=(1, 7, 40)).astype(np.float32)
    logits[0, [0, 2], 0] = 12.0
    tree = build(jnp.asarray(logits), jnp.array([3], jnp.int32), 15)
    n = int(tree.n_valid[0])
    zero_depths = set(np.asarray(tree.depths[0, :n])[np.asarray(tree.tokens[0, :n]) == 0].tolist())
    assert n == 16 and {1, 3} <= zero_depths
    row = int(np.argmax((np.asarray(tree.tokens[0]) == 0) & (np.asarray(tree.depths[0]) == 1)))
    posterior = jnp.zeros((1, 16), jnp.int32)  # the target says 0 everywhere
    accepted = accept(tree, posterior, 7)
    assert accepted.rows[0, 1] == row


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("maker", ["tree", "chain"])
def test_broken_rows_leave_the_root_alone(bad, maker):
    logits = np.random.default_rng(2).normal(size=(3, 7, 20)).astype(np.float32)
    logits[1, 4] = bad
    logits[2, 4, 3:] = -np.inf  # a masked vocabulary is a proper distribution
    make = build if maker == "tree" else jax.jit(ddtree.chain, static_argnums=2)
    tree = make(jnp.asarray(logits), jnp.array([7, 8, 9], jnp.int32), 7)
    assert tree.n_valid.tolist() == [8, 1, 8]
    assert tree.tokens[1].tolist() == [8] + [0] * 7
    assert tree.parents[1].tolist() == [-1] * 8


def test_impossible_tokens_never_enter_the_tree():
    logits = np.full((1, 2, 10), -np.inf, np.float32)
    logits[0, :, :2] = 0.0
    tree = build(jnp.asarray(logits), jnp.array([1], jnp.int32), 16)
    assert int(tree.n_valid[0]) == 7  # 2 + 4 nodes and the root
    assert set(tree.tokens[0, 1:7].tolist()) == {0, 1}


def test_negative_zero_ties_with_zero():
    logits = jnp.array([[[0.0, -0.0, 0.0, -5.0]] * 2], jnp.float32).at[0, :, 0].set(-0.0)
    _, ids = ddtree.marginals(logits, 3)
    assert ids.tolist() == [[[0, 1, 2]] * 2]


def test_chain_is_the_most_likely_path():
    logits = normal(5, 2, 7, 30)
    tree = ddtree.chain(logits, jnp.array([3, 4], jnp.int32), 7, jnp.array([7, 2], jnp.int32))
    np.testing.assert_array_equal(tree.tokens[0, 1:], jnp.argmax(logits[0], -1))
    assert tree.n_valid.tolist() == [8, 3]
    assert tree.parents[1].tolist() == [-1, 0, 1, -1, -1, -1, -1, -1]
    np.testing.assert_array_equal(tree.ancestors[0], np.tril(np.ones((8, 8), bool)))
    with pytest.raises(KdjaxError, match="chain budget 8 exceeds the draft depth 7"):
        ddtree.chain(logits, jnp.array([3, 4], jnp.int32), 8)


def test_one_wrong_draft_is_rejected():
    logits = jnp.zeros((1, 1, 4), jnp.float32).at[0, 0, 2].set(5.0)
    tree = build(logits, jnp.array([0], jnp.int32), 1)
    wrong = accept(tree, jnp.array([[3, 1]], jnp.int32), 1)
    assert (wrong.n_accepted.tolist(), wrong.bonus.tolist()) == ([1], [3])
    right = accept(tree, jnp.array([[2, 1]], jnp.int32), 1)
    assert (right.n_accepted.tolist(), right.bonus.tolist()) == ([2], [1])


def test_acceptance_equals_the_walk_on_random_trees():
    rng = np.random.default_rng(11)
    logits = jnp.asarray(rng.normal(size=(40, 7, 4)).astype(np.float32))
    tree = build(logits, jnp.zeros(40, jnp.int32), 31, jnp.asarray(rng.integers(0, 32, 40), jnp.int32))
    posterior = rng.integers(0, 4, tree.tokens.shape).astype(np.int32)
    result = accept(tree, jnp.asarray(posterior), 7)
    lengths = set()
    for s in range(40):
        children = {(int(tree.parents[s, r]), int(tree.tokens[s, r])): r for r in range(1, int(tree.n_valid[s]))}
        rows = [0]
        while (row := children.get((rows[-1], int(posterior[s, rows[-1]])))) is not None:
            rows.append(row)
        assert result.rows[s, : int(result.n_accepted[s])].tolist() == rows
        assert int(result.bonus[s]) == posterior[s, rows[-1]]
        lengths.add(len(rows))
    assert len(lengths) > 2


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("k", [1, 4, 64])
def test_vocabulary_shards_give_the_same_top_k(devices, k):
    """Integer logits tie across shard borders; a shard may hold fewer than k tokens."""
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} devices")
    vocab = 128
    logits = jnp.asarray(np.random.default_rng(devices).integers(0, 20, (2, 3, vocab)).astype(np.float32))
    mesh = jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec(None, None, "model")
    sharded = jax.jit(
        jax.shard_map(
            lambda x: ddtree.sharded_top_k(x, k, "model"),
            mesh=mesh,
            in_specs=spec,
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    values, ids = sharded(logits)
    order = np.argsort(-np.asarray(logits), axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(logits), order, -1))
    assert k == 1 or np.any(order[..., 1:] // (vocab // devices) != order[..., :-1] // (vocab // devices))
