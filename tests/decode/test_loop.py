"""The rounds from inside: commit in lockstep, stops and limits, inert slots, the compiled program."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from kdjax import tree as ddtree
from kdjax.config import Sampling
from kdjax.decode import DecodeConfig, Decoder, Request, Statistics, loop, pool, tau_macro
from kdjax.decode.request import MAX_STOP_TOKENS
from kdjax.decode.state import Reason
from kdjax.drafter import block_tokens
from kdjax.errors import KdjaxError
from kdjax.model import k2
from tests.decode.models import BLOCK, DRAFTER, MASK, MODEL, RUNTIME, drafter, target

PROMPT = (5, 9, 31, 2, 2, 17, 40)
START = len(PROMPT)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    config = DecodeConfig(mode="tree", budget=8, prefill_chunk=16)
    return Decoder(target(), drafter(), config, RUNTIME, slots=2, context=64)


def after_prefill(decoder: Decoder, prompts: list[tuple[int, ...]], **request):
    state = decoder.empty(64)
    compiled = decoder.compiled(64, state)
    for slot, prompt in enumerate(prompts):
        one = Request(prompt_ids=prompt, max_new_tokens=request.get("max_new_tokens", 20), **request.get("more", {}))
        state, _ = decoder.prefill(compiled, state, slot, one)
    return state


def accepted(rows: list[int], bonus: int, slots: int = 2, path: int = 8) -> ddtree.Acceptance:
    padded = jnp.array([rows + [0] * (path - len(rows))] * slots, jnp.int32)
    return ddtree.Acceptance(padded, jnp.full((slots,), len(rows), jnp.int32), jnp.full((slots,), bonus, jnp.int32))


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_trees_and_samples_are_made_by_the_backend_of_the_runtime(decoder, backend):
    runtime = msgspec.structs.replace(RUNTIME, backend=backend)
    sampling = Sampling(temperature=1.0, top_k=4)
    program = dataclasses.replace(decoder.program, runtime=runtime, sampling=sampling)
    state = jax.eval_shape(lambda: decoder.empty(64))
    tree = jax.eval_shape(lambda: ddtree.root_only(jnp.zeros(2, jnp.int32), 9))
    logits = jax.ShapeDtypeStruct((2, 9, MODEL.vocab_size), jnp.float32)
    drafted = str(jax.make_jaxpr(lambda *args: loop.draft(program, *args))(decoder.params, state))
    sampled = str(jax.make_jaxpr(lambda *args: loop.accept(program, *args))(state, tree, logits))
    kernels = [name in text for text, name in ((drafted, "grow_draft_tree"), (sampled, "choose_tokens"))]
    assert kernels == [backend != "xla"] * 2


def test_commit_of_scattered_nodes_equals_a_fresh_prefill(decoder):
    """Nodes 0, 3, 7 of a 9-row tree: latent rows, rope rows and drafter context move together, and the next round is
    that of a run that never saw the tree."""
    state = after_prefill(decoder, [PROMPT, PROMPT])
    tokens = [int(state.bonus[0]), 11, 12, 13, 14, 15, 16, 17, 18]
    parents = [-1, 0, 0, 0, 1, 2, 3, 3, 7]
    depths, sees = [0], np.eye(9, dtype=bool)
    for row, parent in enumerate(parents[1:], 1):
        depths.append(depths[parent] + 1)
        sees[row] |= sees[parent]
    tree = ddtree.Tree(
        tokens=jnp.broadcast_to(jnp.array(tokens, jnp.int32), (2, 9)),
        depths=jnp.broadcast_to(jnp.array(depths, jnp.int32), (2, 9)),
        parents=jnp.broadcast_to(jnp.array(parents, jnp.int32), (2, 9)),
        ancestors=jnp.broadcast_to(jnp.asarray(sees), (2, 9, 9)),
        scores=jnp.zeros((2, 9), jnp.float32),
        n_valid=jnp.array([9, 9], jnp.int32),
    )

    @jax.jit
    def play(params, state):
        out, logits = loop.verify(decoder.program, params, state, tree)
        posterior = jnp.zeros((2, 9), jnp.int32).at[:, jnp.array([0, 3, 7])].set(jnp.array([13, 17, 23], jnp.int32))
        return loop.commit(decoder.program, params, state, out, posterior, accepted([0, 3, 7], 23)), logits

    state, logits = play(decoder.params, state)
    assert state.cache.lengths.tolist() == [START + 3] * 2
    assert state.output[0, 1:4].tolist() == [13, 17, 23]
    assert state.bonus.tolist() == [23, 23]

    fresh = after_prefill(decoder, [(*PROMPT, tokens[0], 13, 17)] * 2)
    n = START + 3
    for mine, theirs in zip(
        (*state.cache.latent, *state.drafter.k, *state.drafter.v),
        (*fresh.cache.latent, *fresh.drafter.k, *fresh.drafter.v),
        strict=True,
    ):
        np.testing.assert_allclose(mine[:, :n], theirs[:, :n], atol=2e-5)
    # Rows of different tokens differ, so the comparison above can tell them apart.
    assert np.abs(np.diff(np.asarray(fresh.cache.latent[0][0, START:n]), axis=0)).max() > 0.1

    fresh = dataclasses.replace(fresh, bonus=state.bonus)
    look = jax.jit(
        lambda params, state: loop.verify(decoder.program, params, state, loop.draft(decoder.program, params, state))[1]
    )
    np.testing.assert_allclose(look(decoder.params, state), look(decoder.params, fresh), atol=1e-4)


@pytest.mark.parametrize(
    ("cap", "stop", "bonus", "tokens", "reason"),
    [
        (5, 30, 22, [10, 11, 30], Reason.STOP),  # the stop comes before the cap
        (2, 30, 22, [10, 11], Reason.LENGTH),  # the cap comes before the stop
        (3, 30, 22, [10, 11, 30], Reason.STOP),  # both at once
        (9, 45, 22, [10, 11, 30, 20, 21, 22], Reason.RUNNING),
        (6, 22, 22, [10, 11, 30, 20, 21, 22], Reason.STOP),  # the bonus is the stop
        (9, 45, -1, [10, 11, 30, 20, 21], Reason.NOT_FINITE),
        (9, 30, -1, [10, 11, 30], Reason.STOP),  # the bad logits were never needed
        (5, 45, -1, [10, 11, 30, 20, 21], Reason.LENGTH),
    ],
)
def test_stop_limit_and_bad_logits_inside_an_accepted_path(decoder, cap, stop, bonus, tokens, reason):
    more = {"stop_token_ids": (stop,)}
    state = after_prefill(decoder, [PROMPT, PROMPT], max_new_tokens=cap + 1, more=more)
    assert state.reason.tolist() == [Reason.RUNNING] * 2
    out = k2.Forward(
        jnp.zeros((2, 9, MODEL.hidden_size), jnp.float32),
        jnp.zeros((2, 9, 2 * MODEL.hidden_size), jnp.float32),
        state.cache,
    )
    posterior = jnp.array([[10, 11, 30, 20, 21, bonus, 0, 0, 0]] * 2, jnp.int32)
    path = accepted([0, 1, 2, 3, 4, 5], bonus)
    result = jax.jit(loop.commit, static_argnums=0)(decoder.program, decoder.params, state, out, posterior, path)
    n = len(tokens)
    assert result.output[0, 1 : 1 + n].tolist() == tokens
    assert not np.any(result.output[0, 1 + n :])
    assert result.emitted.tolist() == [1 + n] * 2
    assert result.cache.lengths.tolist() == [START + n] * 2  # everything emitted but the newest token is in the cache
    assert result.bonus.tolist() == [tokens[-1]] * 2
    assert result.reason.tolist() == [reason] * 2


def test_finished_and_free_slots_stay_as_they_are(decoder):
    state = after_prefill(decoder, [PROMPT])  # slot 1 is free
    state = dataclasses.replace(state, reason=state.reason.at[0].set(int(Reason.STOP)))
    before = jax.tree.map(np.array, {k: getattr(state, k) for k in FIELDS} | {"lengths": state.cache.lengths})
    rows = np.array(state.cache.latent[0][0, :START])
    compiled = decoder.compiled(64, state)
    stepped = jax.jit(loop.one_round, static_argnums=0)(decoder.program, decoder.params, state)
    after = {k: getattr(stepped, k) for k in FIELDS} | {"lengths": stepped.cache.lengths}
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, after))
    np.testing.assert_array_equal(stepped.cache.latent[0][0, :START], rows)
    _, report = compiled.decode(decoder.params, stepped, np.int32(9), np.int32(1))
    assert report.rounds.tolist() == [0, 0]  # no round without a running slot


FIELDS = ("bonus", "output", "emitted", "reason", "limit", "budget", "seed", "stop", "rounds", "accepted_by_depth")


def test_a_call_returns_as_soon_as_a_slot_is_free(decoder):
    state = after_prefill(decoder, [PROMPT, PROMPT[:3]])
    state = dataclasses.replace(state, limit=jnp.array([3, 20], jnp.int32))
    compiled = decoder.compiled(64, state)
    state, report = compiled.decode(decoder.params, state, np.int32(50), np.int32(2))
    assert report.reason.tolist() == [Reason.LENGTH, Reason.RUNNING]
    assert 1 <= int(report.rounds[1]) <= 2
    _, report = compiled.decode(decoder.params, state, np.int32(50), np.int32(1))
    assert report.reason.tolist() == [Reason.LENGTH, Reason.LENGTH]
    assert report.emitted.tolist() == [3, 20]


def test_a_waiting_request_takes_a_slot_the_round_it_is_free(decoder):
    requests = [Request(prompt_ids=PROMPT, max_new_tokens=n, seed=i) for i, n in enumerate((12, 50, 3))]
    rounds, commits = {}, []
    for commit in decoder.stream(requests):
        rounds[commit.request] = commit.so_far.statistics.rounds
        commits.append((commit.request, commit.finish_reason, dict(rounds)))
    (ended,) = (seen for request, reason, seen in commits if request == 0 and reason)
    admitted = next(seen for request, _, seen in commits if request == 2)
    assert 2 < ended[0] == admitted[1] < 12  # the neighbour has not run on meanwhile
    assert [request for request, reason, _ in commits if reason] == [0, 2, 1]


def test_draft_block_starts_with_the_bonus_and_ignores_the_budget(decoder):
    """Slot 0 of the block is the committed token, the rest is MASK, whatever the budget of the tree."""
    assert block_tokens(DRAFTER, jnp.array([7], jnp.int32)).tolist() == [[7] + [MASK] * (BLOCK - 1)]
    state = after_prefill(decoder, [PROMPT, PROMPT[::-1]])
    propose = jax.jit(decoder.program.drafting.propose)
    logits = propose(decoder.params, state)
    other = propose(decoder.params, dataclasses.replace(state, bonus=state.bonus + 1))
    assert np.all(np.abs(np.asarray(logits - other)).max((1, 2)) > 1e-3)
    build = jax.jit(loop.draft, static_argnums=0)
    wide = build(decoder.program, decoder.params, state)
    for budget in (1, 4):
        narrow = build(dataclasses.replace(decoder.program, budget=budget), decoder.params, state)
        np.testing.assert_array_equal(narrow.tokens, wide.tokens[:, : 1 + budget])
        np.testing.assert_array_equal(narrow.scores, wide.scores[:, : 1 + budget])  # bit for bit


def test_second_shorter_request_in_the_same_slot_equals_a_cold_run():
    one = Decoder(target(), drafter(), DecodeConfig(budget=8, prefill_chunk=16), RUNTIME, slots=1, context=64)
    first = Request(prompt_ids=tuple(range(40)), max_new_tokens=20)
    second = Request(prompt_ids=PROMPT[:3], max_new_tokens=20)
    warm = one.generate([first, second])
    assert one.generate([second])[0].token_ids == warm[1].token_ids
    assert one.generate([second])[0].statistics == warm[1].statistics


def test_prompt_that_fills_the_capacity_is_not_shifted():
    """The last chunk is wider than the rows left: padding rows fall off the end instead of moving the write back."""
    prompt = tuple(np.random.default_rng(0).integers(0, MODEL.vocab_size, 62).tolist())
    outputs = []
    for chunk in (62, 48, 10**9):  # a chunk is never wider than the context
        config = DecodeConfig(budget=4, prefill_chunk=chunk)
        one = Decoder(target(), drafter(), config, RUNTIME, context=64)
        outputs.append(one.generate([Request(prompt_ids=prompt, max_new_tokens=2)])[0].token_ids)
    assert outputs[0] == outputs[1] == outputs[2]


def lowered(decoder: Decoder):
    state = decoder.empty(64)
    return decoder.compiled(64, state), state


def test_programs_have_no_host_traffic_and_reuse_the_state(decoder):
    compiled, state = lowered(decoder)
    for program in (compiled.decode, compiled.prefill):
        text = program.as_text()
        assert "while" in text
        assert not re.search(r"callback|infeed|outfeed|\bsend\(|\brecv\(", text)
        aliased = re.search(r"input_output_alias=\{(.*?)\}, entry", text, re.S)
        assert aliased is not None and aliased[1].count("alias)") >= len(jax.tree.leaves(state))
    latent = state.cache.latent[0]
    compiled.decode(decoder.params, state, np.int32(1), np.int32(1))
    assert latent.is_deleted()


def test_no_callback_detector_detects():
    def noisy(x):
        jax.debug.callback(lambda _: None, x)
        return x

    text = jax.jit(noisy).lower(jnp.zeros(3)).compile().as_text()
    assert re.search(r"callback|infeed|outfeed|\bsend\(|\brecv\(", text)


def test_nan_logits_end_the_stream_with_an_error():
    model = target()
    weight = np.array(model.params["lm_head"]["weight"])
    weight[3] = np.nan
    one = Decoder(
        dataclasses.replace(model, params=model.params | {"lm_head": {"weight": weight}}),
        None,
        DecodeConfig(mode="autoregressive", prefill_chunk=16),
        RUNTIME,
        context=64,
    )
    with pytest.raises(
        KdjaxError, match=r"^request 0: the logits at position 6 have no finite maximum .* check [^\n]*$"
    ):
        one.generate([Request(prompt_ids=PROMPT, max_new_tokens=4)])


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"prompt_ids": ()}, "request 1: the prompt is empty: give at least one token"),
        ({"max_new_tokens": 0}, "request 1: max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": -4}, "max_new_tokens=-4 must be at least 1"),
        ({"prompt_ids": (1,) * 64}, "the prompt has 64 tokens, the context holds 64: shorten"),
        ({"prompt_ids": (1,) * 60}, "60 prompt tokens and max_new_tokens=5 exceed the context of 64: lower .* to 4"),
        ({"prompt_ids": (1, 48)}, "prompt_ids has token 48 outside the vocabulary of 48: use the tokenizer"),
        ({"prompt_ids": (-1,)}, "prompt_ids has token -1 outside the vocabulary"),
        ({"stop_token_ids": (99,)}, "stop_token_ids has token 99 outside the vocabulary"),
        ({"stop_token_ids": tuple(range(17))}, f"17 stop tokens, at most {MAX_STOP_TOKENS} fit: drop some"),
        ({"seed": -1}, r"seed=-1 must lie in \[0, 2\^32\)"),
        ({"budget": 9}, "budget=9 exceeds the compiled limit of 8: lower it or raise"),
        ({"budget": -1}, "budget=-1 is negative: use 0"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(decoder, request_fields, message):
    good = {"prompt_ids": PROMPT, "max_new_tokens": 5}
    with pytest.raises(KdjaxError, match=message) as error:
        decoder.stream([Request(**good), Request(**(good | request_fields))])
    assert "\n" not in str(error.value)


def test_models_that_do_not_fit_are_refused():
    model, own = target(), drafter()
    for change, message in [
        ({"hidden_size": 64}, "target of hidden_size 64, but target.hidden_size = 32"),
        ({"vocab_size": 50}, "target of vocab_size 50, but target.vocab_size = 48"),
        ({"num_target_layers": 5, "target_layer_ids": (1, 4)}, "num_hidden_layers 5, but target.num_hidden_layers = 2"),
    ]:
        fields = {f: getattr(DRAFTER, f) for f in DRAFTER.__struct_fields__} | change
        wrong = dataclasses.replace(own, config=type(DRAFTER)(**fields))
        with pytest.raises(KdjaxError, match=message):
            Decoder(model, wrong, DecodeConfig(), RUNTIME)
    with pytest.raises(KdjaxError, match="mode=tree with budget=15 needs a drafter: give one or use autoregressive"):
        Decoder(model, None, DecodeConfig(), RUNTIME)
    with pytest.raises(KdjaxError, match="budget 5000 at depth 7 needs more than .* lower it"):
        Decoder(model, own, DecodeConfig(budget=5000), RUNTIME)
    with pytest.raises(KdjaxError, match="slots=0 must be at least 1"):
        Decoder(model, own, DecodeConfig(), RUNTIME, slots=0)
    with pytest.raises(KdjaxError, match="context=999 must lie in 1 to .*=256"):
        Decoder(model, own, DecodeConfig(), RUNTIME, context=999)


@pytest.mark.parametrize(
    "bad",
    [
        {"mode": "beam"},
        {"budget": -1},
        {"rounds_per_call": 0},
        {"prefill_chunk": 0},
        {"temperature": -1.0},
        {"rounds_per_call": 2**31},
    ],
)
def test_impossible_decode_configs_are_refused(bad):
    with pytest.raises(KdjaxError, match=f"{next(iter(bad))}="):
        DecodeConfig(**bad)


def test_statistics():
    one, two = Statistics(4, 10, (3, 2, 1)), Statistics(2, 3, (1, 0, 0))
    assert one.tau == 2.5
    assert one.acceptance_by_depth == (0.75, 2 / 3, 0.5)
    assert two.acceptance_by_depth == (0.5, 0.0, 0.0)
    assert pool([one, two]) == Statistics(6, 13, (4, 2, 1))
    assert tau_macro([one, two, Statistics(0, 0, (0, 0, 0))]) == 2.0
