import numpy as np
import pytest

from kdjax.errors import KdjaxError
from kdjax.reference import model
from kdjax.reference.loop import DFlash, Target, generate
from kdjax.reference.sampling import Sampling, sample
from tests import oracles, tolerances

LIMIT = 16


class Table:
    """Proposes from a table of draft logits by position, or from what `guess` returns for it."""

    taps = ()

    def __init__(self, guess):
        self.guess = guess

    def propose(self, root, start, new_taps):
        return self.guess(start)


def random_guesses(vocab, seed):
    return Table(lambda start: np.random.default_rng((seed, start)).standard_normal((7, vocab)) * 3)


def hints(continuation, prompt_length, vocab, wrong_every=0):
    """Puts most mass on the true continuation; every `wrong_every`-th position gets another token on top of it."""

    def guess(start):
        logits = np.zeros((7, vocab))
        for depth, position in enumerate(range(start + 1 - prompt_length, start + 8 - prompt_length)):
            token = continuation[position % len(continuation)]
            logits[depth, token] = 20.0
            if wrong_every and position % wrong_every == 0:
                logits[depth, (token + 1) % vocab] = 21.0
        return logits

    return Table(guess)


@pytest.fixture(scope="module")
def k2(target):
    return Target(*target("hf_k2_a"))


@pytest.fixture(scope="module")
def prompt():
    return oracles.prompts(oracles.load("hf_k2_a"))[0].input_ids.tolist()


@pytest.fixture(scope="module")
def continuation(k2, prompt):
    return generate(k2, None, prompt, 40, "autoregressive").token_ids


def proposer_of(case, k2, drafter):
    if case.checkpoint.exists():
        return DFlash(*drafter(case.path.name), k2)
    table, prompt_length = case.inputs["draft_logits_by_start"], len(case.meta["prompt"])
    return Table(lambda start: table[start - prompt_length])


@pytest.mark.parametrize(("name", "run"), oracles.E2E_RUNS)
def test_runs_match_the_papers_loop(oracle, target, drafter, name, run):
    case = oracle(name)
    expected = oracles.runs(case)[run]
    k2 = Target(*target(case.meta["target_case"]))
    mode, budget = ("chain", 0) if run == "chain" else ("tree", int(run))
    done = generate(k2, proposer_of(case, k2, drafter), case.meta["prompt"], case.meta["new_tokens"], mode, budget)

    assert done.token_ids == case.meta["final_tokens"] and done.finish_reason == "length"
    assert [len(r.accepted) for r in done.rounds] == expected["accepted_lengths"]
    for i, (ours, theirs) in enumerate(zip(done.rounds, expected["rounds"], strict=True)):
        assert (ours.start, ours.root, ours.bonus) == (theirs["start"], theirs["root"], theirs["next_token"])
        if oracles.tree_is_determined(theirs):
            assert (ours.tree.tokens, ours.tree.parents) == (theirs["tree_tokens"], theirs["parents"])
            assert ours.accepted == theirs["accepted_indices"]
        if (logits := oracles.round_logits(case, run, i)) is not None:
            tolerances.ROUND_LOGITS.check(ours.draft_logits, logits[0])
            tolerances.ROUND_LOGITS.check(ours.verify_logits, logits[1])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8), Sampling(temperature=1.3, top_p=0.9)])
def test_every_mode_writes_the_same_tokens(k2, prompt, sampling):
    vocab, seed = k2.config.vocab_size, 1
    plain = generate(k2, None, prompt, LIMIT, "autoregressive", sampling=sampling, seed=seed)
    helpful = hints(plain.token_ids, len(prompt), vocab, wrong_every=3)
    for mode, budget in (("chain", 0), ("tree", 1), ("tree", 15), ("tree", 32)):
        done = generate(k2, helpful, prompt, LIMIT, mode, budget, sampling, seed)
        assert done.token_ids == plain.token_ids
    assert len(done.rounds) < LIMIT / 2
    useless = generate(k2, random_guesses(vocab, seed), prompt, LIMIT, "tree", 15, sampling, seed)
    assert useless.token_ids == plain.token_ids


def test_each_token_is_sampled_at_its_own_position(k2, prompt):
    """Against the definition: a whole forward over the true prefix per token, no cache, noise of that position."""
    sampling, ids = Sampling(temperature=1.0), list(prompt)
    for _ in range(6):
        out = model.forward(
            k2.params, k2.config, np.array(ids), np.arange(len(ids)), model.empty_cache(k2.config), None, "materialised"
        )
        ids.append(sample(model.logits(k2.params, out.hidden[-1:])[0], sampling, 9, len(ids)))
    done = generate(k2, random_guesses(512, 0), prompt, 6, "tree", 8, sampling, 9)
    assert done.token_ids == ids[len(prompt) :]


def test_seed_and_temperature_change_the_tokens(k2, prompt):
    def tokens(temperature, seed):
        sampling = Sampling(temperature=temperature)
        return generate(k2, None, prompt, LIMIT, "autoregressive", sampling=sampling, seed=seed).token_ids

    assert tokens(1.0, 1) == tokens(1.0, 1)
    assert len({tuple(tokens(t, s)) for t, s in ((1.0, 1), (1.0, 2), (0.5, 1), (0.0, 1))}) == 4


@pytest.mark.parametrize(("mode", "budget"), [("chain", 0), ("tree", 7), ("tree", 16)])
def test_a_perfect_drafter_has_every_block_accepted_whole(k2, prompt, continuation, mode, budget):
    proposer = hints(continuation, len(prompt), k2.config.vocab_size)
    done = generate(k2, proposer, prompt, 32, mode, budget)
    assert [len(r.accepted) for r in done.rounds] == [8, 8, 8, 8]
    assert done.token_ids == continuation[:32]


@pytest.mark.parametrize(
    ("mode", "budget"), [("autoregressive", 0), ("chain", 0), ("tree", 0), ("tree", 7), ("tree", 33)]
)
@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9])
def test_limits_are_exact(k2, prompt, continuation, mode, budget, limit):
    done = generate(k2, hints(continuation, len(prompt), k2.config.vocab_size), prompt, limit, mode, budget)
    assert (done.token_ids, done.finish_reason) == (continuation[:limit], "length")


@pytest.mark.parametrize(("mode", "budget"), [("autoregressive", 0), ("chain", 0), ("tree", 4), ("tree", 16)])
@pytest.mark.parametrize("index", [0, 1, 3, 8])
def test_output_ends_at_a_stop_token_inside_an_accepted_path(k2, prompt, continuation, mode, budget, index):
    stop = continuation[index]
    first = continuation.index(stop)
    proposer = hints(continuation, len(prompt), k2.config.vocab_size)
    done = generate(k2, proposer, prompt, LIMIT, mode, budget, stop_token_ids=[stop])
    assert (done.token_ids, done.finish_reason) == (continuation[: first + 1], "stop")
    assert len(done.rounds) <= first + 1


def test_the_earlier_of_stop_and_limit_wins(k2, prompt, continuation):
    proposer, stop = hints(continuation, len(prompt), k2.config.vocab_size), [continuation[2]]
    early = generate(k2, proposer, prompt, 5, "tree", 16, stop_token_ids=stop)
    assert (early.token_ids, early.finish_reason) == (continuation[:3], "stop")
    short = generate(k2, proposer, prompt, 2, "tree", 16, stop_token_ids=stop)
    assert (short.token_ids, short.finish_reason) == (continuation[:2], "length")


def test_the_mask_id_is_an_ordinary_token_of_prompt_and_output(oracle, k2, drafter):
    case = oracle("e2e_random_drafter_p0")
    config, params = drafter("e2e_random_drafter_p0")
    mask = config.mask_token_id
    prompt = [*case.meta["prompt"][:6], mask, 5, mask]
    head = k2.params["lm_head"]["weight"].copy()
    head[mask] = 4 * head[case.meta["final_tokens"][0]]
    likes_mask = k2._replace(params=dict(k2.params, lm_head={"weight": head}))
    plain = generate(likes_mask, None, prompt, 24, "autoregressive")
    assert mask in plain.token_ids
    done = generate(likes_mask, DFlash(config, params, likes_mask), prompt, 24, "tree", 8)
    assert done.token_ids == plain.token_ids


def test_empty_prompts_and_limits_below_one_are_refused(k2):
    for prompt, limit in (([], 5), ([1], 0), ([1], -3)):
        with pytest.raises(KdjaxError, match=f"max_new_tokens={limit}"):
            generate(k2, None, prompt, limit, "autoregressive")
