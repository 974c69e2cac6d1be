"""Whole decode loops on meshes of fake devices: tokens, rounds and acceptance are those of one device."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kdjax.checkpoint import Drafter, load_drafter, load_target
from kdjax.config import MeshConfig
from kdjax.decode import Completion, DecodeConfig, Decoder, Params, Request, loop
from kdjax.drafter import abstract_params
from kdjax.model.runtime import Runtime
from tests.checkpoint.random_models import random_drafter
from tests.decode.models import Scripted
from tests.oracles import E2E_TEACHER, load
from tests.sharding import own_case
from tests.sharding.splits import possible, some
from tests.tolerances import DRAFTER

PACKED = Runtime(compute_dtype="float32", cache_dtype="float32", expert_weights="packed")
NEW = 48


def check(completion: Completion, tokens: list[int], accepted: list[int]) -> None:
    """`accepted` counts the root, per round."""
    assert list(completion.token_ids[: len(tokens)]) == tokens
    counts = collections.Counter(depth for n in accepted for depth in range(1, n))
    statistics = completion.statistics
    assert statistics.rounds == len(accepted)
    assert statistics.accepted_by_depth == tuple(counts[d + 1] for d in range(len(statistics.accepted_by_depth)))


def own_decoder(own: own_case.Case, mesh: MeshConfig, mode: str) -> Decoder:
    runtime = msgspec.structs.replace(PACKED, mesh=mesh)
    drafting = Scripted(own_case.DEPTH, mesh=mesh)
    config = DecodeConfig(mode=mode, budget=own_case.BUDGET, prefill_chunk=16)
    decoder = Decoder(
        load_target(own.folder, PACKED), None, config, runtime, slots=2, context=own_case.POSITIONS, drafting=drafting
    )
    decoder.params = decoder.place(Params(decoder.params.target, jnp.asarray(own.table)))
    return decoder


OWN_MESHES = [*own_case.MESHES, MeshConfig(sequence=8), MeshConfig(sequence=2, tensor=2, expert=2)]


@pytest.mark.parametrize("mesh", some(OWN_MESHES, [MeshConfig(tensor=2, expert=4)]))
def test_own_case_decodes_as_the_reference(own, mesh):
    decoder = own_decoder(own, mesh, "tree")
    requests = [Request(prompt_ids=p, max_new_tokens=own_case.NEW, seed=i) for i, p in enumerate(own_case.PROMPTS)]
    for completion, truth in zip(decoder.generate(requests), own.truth, strict=True):
        check(completion, truth.token_ids, [len(r.accepted) for r in truth.rounds])


def golden_decoder(case, mesh: MeshConfig, mode: str, slots: int) -> Decoder:
    runtime = msgspec.structs.replace(PACKED, mesh=mesh)
    target = load_target(load(case.meta["target_case"]).checkpoint, PACKED)
    config = DecodeConfig(mode=mode, budget=16)
    if not case.inputs:  # no table of draft logits: the case has a drafter
        drafter = load_drafter(case.checkpoint, PACKED, target.config)
        return Decoder(target, drafter, config, runtime, slots=slots)
    drafting = Scripted(own_case.DEPTH, mesh=mesh)
    decoder = Decoder(target, None, config, runtime, slots=slots, drafting=drafting)
    start = len(case.meta["prompt"])
    table = np.zeros((1, start + NEW, own_case.DEPTH, target.config.vocab_size), np.float32)
    table[0, start:] = case.inputs["draft_logits_by_start"].astype(np.float32)
    decoder.params = decoder.place(Params(decoder.params.target, jnp.asarray(table)))
    return decoder


def check_golden(case, decoder: Decoder, labels: list[str]) -> None:
    # The golden loop runs until 48 tokens after the first are committed, so the last round may overshoot.
    prompt = tuple(case.meta["prompt"])
    budgets = [None if label == "chain" else int(label) for label in labels]
    requests = [Request(prompt_ids=prompt, max_new_tokens=NEW + 1, budget=b) for b in budgets]
    for label, completion in zip(labels, decoder.generate(requests), strict=True):
        check(completion, case.meta["final_tokens"], case.meta["runs"][label]["accepted_lengths"])


TARGET_MESHES = [mesh for _, mesh in possible(("hf_k2_a",))]


@pytest.mark.parametrize("mesh", some(TARGET_MESHES, [MeshConfig(expert=8, outside_experts="replicated")]))
@pytest.mark.parametrize("name", E2E_TEACHER[:1])
def test_golden_trees(name, mesh):
    case = load(name)
    labels = ["0", "4", "8", "16"]
    check_golden(case, golden_decoder(case, mesh, "tree", len(labels)), labels)


@pytest.mark.parametrize(
    "mesh",
    some(
        [
            MeshConfig(sequence=2),
            MeshConfig(sequence=2, expert=2),
            MeshConfig(sequence=2, expert=4, outside_experts="replicated"),
        ],
        [MeshConfig(sequence=2, expert=2)],
    ),
)
def test_golden_trees_with_a_cache_dealt_out(mesh):
    """A prompt of 200 tokens: each device has two blocks of rows, and trees lie across their borders."""
    case = load("e2e_teacher_p2")
    labels = ["0", "4", "8", "16"]
    check_golden(case, golden_decoder(case, mesh, "tree", len(labels)), labels)


@pytest.mark.parametrize("mesh", some(TARGET_MESHES, []))
def test_golden_chains(mesh):
    case = load("e2e_teacher_p0")
    check_golden(case, golden_decoder(case, mesh, "chain", 1), ["chain"])


@pytest.mark.parametrize("mesh", some(TARGET_MESHES, [MeshConfig(tensor=2, expert=2)]))
def test_golden_runs_with_a_drafter(mesh):
    """Its two key heads go to two devices at most; where the mesh is larger, the drafter is repeated."""
    case = load("e2e_random_drafter_p0")
    if mesh.size(mesh.model_axes) > 2:
        mesh = msgspec.structs.replace(mesh, drafter="replicated")
    check_golden(case, golden_decoder(case, mesh, "tree", 3), ["0", "8", "16"])


def drafting_decoder(own: own_case.Case, mesh: MeshConfig) -> Decoder:
    params = jax.tree.map(
        lambda leaf, abstract: jnp.asarray(leaf, abstract.dtype),
        random_drafter(own_case.DRAFTER),
        abstract_params(own_case.DRAFTER, PACKED),
    )
    runtime = msgspec.structs.replace(PACKED, mesh=mesh)
    config = DecodeConfig(budget=own_case.BUDGET, prefill_chunk=16)
    drafter = Drafter(own_case.DRAFTER, params)
    return Decoder(load_target(own.folder, PACKED), drafter, config, runtime, slots=2, context=own_case.POSITIONS)


def test_a_split_drafter_drafts_the_same(own):
    """Draft logits after contexts of different length, from devices that hold one key head each."""
    rng = np.random.default_rng(1)
    shape = (2, 20, len(own_case.DRAFTER.target_layer_ids) * own_case.DRAFTER.hidden_size)
    taps = jnp.asarray(rng.normal(size=shape), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32), (2, 20))
    n_valid = jnp.asarray([20, 7], jnp.int32)
    drafts = []
    for mesh in (MeshConfig(), MeshConfig(tensor=8)):
        decoder = drafting_decoder(own, mesh)
        program = decoder.program

        def draft(params, state, taps, positions, n_valid, drafting=program.drafting):
            drafter = drafting.append(params, state.drafter, taps, positions, n_valid)
            cache = dataclasses.replace(state.cache, lengths=n_valid)
            return drafting.propose(params, dataclasses.replace(state, drafter=drafter, cache=cache))

        def spread(params, state, program=program, draft=draft):
            vocabulary = P(None, None, program.vocabulary_axes or None)
            return loop.on_mesh(program, draft, params, state, taps, positions, n_valid, out_specs=lambda _: vocabulary)

        drafts.append(np.asarray(jax.jit(spread)(decoder.params, decoder.empty(64))))
    assert drafts[0].shape == (2, own_case.DEPTH, own_case.MODEL.vocab_size) and drafts[0].std() > 0.5
    DRAFTER.check(drafts[1], drafts[0])


def test_the_program_gathers_neither_weights_nor_logits_and_copies_no_cache(own):
    """A full round with a split drafter: two all-reduces per layer and one per embedding, and small gathers."""
    decoder = drafting_decoder(own, MeshConfig(tensor=8))
    state = decoder.empty(64)
    decode = decoder.compiled(64, state).decode
    text = decode.as_text()
    layers = own_case.MODEL.num_hidden_layers + own_case.DRAFTER.num_hidden_layers
    assert text.count(" all-reduce(") == 2 * layers + 2
    assert not re.search(r" (all-to-all|collective-permute|reduce-scatter)\(", text)
    gathered = re.findall(r"\[([\d,]*)\]\S* all-gather\(", text)
    # Per slot and drafted depth: candidates of eight devices, their ids, log-sum-exps; per row: maxima and ids; and the
    # drafter's features. A whole row of logits would be 128 wide.
    sizes = sorted(int(np.prod([int(n) for n in shape.split(",")])) for shape in gathered)
    rows = 2 * (1 + own_case.BUDGET)
    assert len(sizes) == 6 and sizes[-1] <= max(
        2 * own_case.DEPTH * 8 * own_case.BUDGET, rows * own_case.MODEL.hidden_size
    )
    own_share = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert decode.memory_analysis().alias_size_in_bytes == own_share
    requests = [Request(prompt_ids=p, max_new_tokens=own_case.NEW) for p in own_case.PROMPTS]
    for completion, truth in zip(decoder.generate(requests), own.truth, strict=True):
        assert list(completion.token_ids) == truth.token_ids
    assert not re.search(r"callback|infeed|outfeed|\bsend\(|\brecv\(", text)
