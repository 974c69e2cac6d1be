"""One device's share of a mesh, run alone, is what that device computes on the mesh."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdjax.bench import stages
from kdjax.bench.subject import _CODE_DEVIATION, Subject, _symmetric_codes, hundredth
from kdjax.config import ONE_DEVICE, MeshConfig, ModelPair, load
from kdjax.decode.state import Reason
from kdjax.errors import KdjaxError
from kdjax.plan import Workload, memory
from kdjax.sharding import place, shardings
from pallas_kernels.int4_experts.workload import dense_expert

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
PAIR = hundredth(load(ModelPair, CONFIGS / "models" / "kimi-k2.6.toml"))
TP2 = MeshConfig(tensor=2)
WORKLOAD = Workload(context=64, streams=2, budget=3)
MOE = 1


def subject(config: MeshConfig, *, rank: bool = False, backend="xla") -> Subject:
    return Subject.of(PAIR, config, backend, jax.devices(), rank=rank)


def shard(tree, device: int):
    """The part of every array that one device of a mesh holds, on the first device."""
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a.addressable_shards[device].data)), tree)


def run(subject: Subject, stage, params, hidden):
    program = subject.program(WORKLOAD.budget)
    work = jax.jit(functools.partial(stages.make_work, program, WORKLOAD.streams))(jax.random.key(0))
    work = dataclasses.replace(work, hidden=jnp.copy(hidden))  # donated
    if program.mesh is not None:
        params = place(params, shardings(program.param_specs(params), program.mesh))
        work = jax.device_put(work, shardings(stages.work_specs(program), program.mesh))
    return stages.repeat(program, stage, params, subject.state(WORKLOAD), work, jnp.int32(1))[1]


def test_the_shares_of_all_ranks_make_the_model():
    whole, alone = subject(ONE_DEVICE), subject(TP2, rank=True)
    params = whole.params()
    program = subject(TP2).program(WORKLOAD.budget)
    split = place(params, shardings(program.param_specs(params), program.mesh))
    ranks = [shard(split, device) for device in range(2)]
    shape = (WORKLOAD.streams, WORKLOAD.budget + 1, PAIR.target.hidden_size)
    hidden = jax.random.normal(jax.random.key(3), shape, jnp.bfloat16)

    def both(*arguments):
        """lm_head and the experts, each of the same hidden states."""
        work = arguments[-1]
        state, heads = stages.lm_head(*arguments)
        _, experts = stages.experts((MOE,), *arguments)
        return state, dataclasses.replace(work, logits=heads.logits, hidden=experts.hidden)

    expected, parts = run(whole, both, params, hidden), [run(alone, both, rank, hidden) for rank in ranks]
    np.testing.assert_array_equal(jnp.concatenate([part.logits for part in parts], axis=-1), expected.logits)
    first, total = (sum(part.hidden.astype(jnp.float32) for part in some) for some in (parts[:1], parts))
    off = [
        jnp.linalg.norm(some - expected.hidden.astype(jnp.float32))
        / jnp.linalg.norm(expected.hidden.astype(jnp.float32))
        for some in (first, total)
    ]
    assert off[1] < 0.01 < 0.3 < off[0]  # two roundings to bfloat16 beside one


def test_exchanges_alone_leave_what_they_sum():
    """So that they stay finite however often they are repeated."""
    mesh = subject(TP2)
    params = mesh.params()
    hidden = jax.random.normal(jax.random.key(3), (WORKLOAD.streams, WORKLOAD.budget + 1, PAIR.target.hidden_size))
    hidden = hidden.astype(jnp.bfloat16)
    summed, parts = (run(mesh, functools.partial(stages.exchanges, on), params, hidden).hidden for on in (True, False))
    np.testing.assert_allclose(summed.astype(jnp.float32), hidden.astype(jnp.float32), rtol=0.05)
    assert jnp.linalg.norm(parts.astype(jnp.float32)) < 0.3 * jnp.linalg.norm(hidden.astype(jnp.float32))


def test_a_mesh_lends_its_first_device_its_share():
    mesh = subject(TP2)
    params, rank = mesh.params(), mesh.rank()
    share = mesh.share_of_rank(params)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), (share, rank.params()))
    assert shapes[0] == shapes[1]
    for lent, whole in zip(jax.tree.leaves(share), jax.tree.leaves(params), strict=True):
        assert lent.sharding.mesh == rank.mesh
        assert lent.unsafe_buffer_pointer() == whole.addressable_shards[0].data.unsafe_buffer_pointer()


def test_a_rank_holds_its_share():
    rank = subject(TP2, rank=True)
    params, state = rank.params(), rank.state(WORKLOAD)
    held = memory(PAIR, TP2, WORKLOAD)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params.target)) == sum(held.target.values())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params.drafter)) == sum(held.drafter.values())
    assert state.reason.tolist() == [Reason.RUNNING] * 2 and state.cache.lengths.tolist() == [WORKLOAD.context] * 2
    moved = dataclasses.replace(state, cache=dataclasses.replace(state.cache, lengths=state.cache.lengths + 5))
    assert rank.rewound(moved, WORKLOAD).cache.lengths.tolist() == [WORKLOAD.context] * 2


def test_random_weights_of_a_mesh_differ_where_they_are_split():
    params = subject(TP2).params()
    q_b, q_a = (params.target["layers"][MOE]["self_attn"][name]["weight"] for name in ("q_b_proj", "q_a_proj"))
    first, second = (np.asarray(s.data, np.float32) for s in q_b.addressable_shards)
    assert first.shape == second.shape and (first != second).mean() > 0.9
    first, second = (np.asarray(s.data, np.float32) for s in q_a.addressable_shards)
    np.testing.assert_array_equal(first, second)
    layers = [np.asarray(params.target["layers"][i]["self_attn"]["q_a_proj"]["weight"], np.float32) for i in (0, 1)]
    assert (layers[0] != layers[1]).mean() > 0.9


def test_tiles_hold_weights_that_keep_the_size_of_what_they_multiply():
    tiles = subject(MeshConfig(tensor=8), rank=True, backend="interpret").params().target["layers"][MOE]["mlp"]
    for part, columns in (("gate", PAIR.target.hidden_size), ("down", PAIR.target.moe_intermediate_size // 8)):
        dense = dense_expert(tiles["experts"]["tiles"], part, jnp.int32(3))
        assert dense.shape[1] == columns
        assert jnp.std(dense) * columns**0.5 == pytest.approx(1.0, rel=0.1)


def test_what_cannot_run_alone_is_said():
    with pytest.raises(KdjaxError, match="mesh sequence=2: a rank attends with the others"):
        subject(MeshConfig(sequence=2), rank=True)
    with pytest.raises(KdjaxError, match="needs a mesh of several devices"):
        subject(ONE_DEVICE, rank=True)
    without = Subject.of(ModelPair(target=PAIR.target), ONE_DEVICE, "xla", jax.devices(), rank=False)
    with pytest.raises(KdjaxError, match="budget 3 needs a drafter"):
        without.program(3)


@pytest.mark.parametrize("dtype", [jnp.uint16, jnp.uint32])
def test_codes_have_no_mean(dtype):
    """Or every token of a deep model comes to choose the same experts."""
    words = _symmetric_codes(jax.random.bits(jax.random.key(0), (4096,), dtype))
    codes = np.stack([(words >> shift) & 15 for shift in range(0, 8 * words.dtype.itemsize, 4)]).astype(int) - 8
    assert codes.min() == -7 and codes.max() == 7
    assert abs(codes.mean()) < 0.1
    assert abs(codes.std() - _CODE_DEVIATION) < 0.1
