import math

import numpy as np
import pytest

from kdjax.errors import KdjaxError
from kdjax.evaluate import Scorer, workbench
from kdjax.evaluate.benchmarks import mmlu
from kdjax.evaluate.continuations import CHUNK, ContinuationScorer, encode_pair
from kdjax.run.experiment import result
from tests.cli.conftest import tiny as tiny
from tests.evaluate.benchmarks.test_generation import config, model, untimed

model = model


def test_pairs_are_split_where_the_context_ends():
    encode = lambda text: [len(word) for word in text.split(" ")]  # noqa: E731
    assert encode_pair(encode, "a bc", " def") == ((1, 2), (3,))
    assert encode_pair(encode, "a bc  ", "def") == ((1, 2), (0, 3))


def test_scores_are_those_of_the_rolling_scorer(model):
    target, tokenizer, runtime = workbench.model(model, mmlu.Config().runtime)
    scorer = ContinuationScorer(target, runtime, rows=2)
    words = "the quick brown fox jumps over the lazy dog " * 20
    texts = [words[:n] for n in (5, 40, 300, 560)]
    start = (tokenizer.eos_id,)
    found = dict(scorer.scores([(start, tuple(tokenizer.encode(text))) for text in texts]))
    rolling = Scorer(target, runtime, window=256)
    assert CHUNK < len(tokenizer.encode(texts[-1])) < 256
    for i, text in enumerate(texts):
        nats = rolling.text(text, tokenizer.encode, tokenizer.eos_id).bits * math.log(2)
        np.testing.assert_allclose(found[i].log_likelihood, -nats, rtol=1e-5)
        assert not found[i].is_greedy


def test_one_token_continuations_share_a_row_and_sum_to_the_whole(model):
    target, tokenizer, runtime = workbench.model(model, mmlu.Config().runtime)
    scorer = ContinuationScorer(target, runtime, rows=2)
    context = tuple(tokenizer.encode("Answer:"))
    pairs = [(context, (token,)) for token in range(tokenizer.vocab_size)]
    found = dict(scorer.scores(pairs))
    assert len(found) == tokenizer.vocab_size and sum(c.is_greedy for c in found.values()) == 1
    assert sum(math.exp(c.log_likelihood) for c in found.values()) == pytest.approx(1, abs=1e-5)
    best = max(found, key=lambda token: found[token].log_likelihood)
    assert found[best].is_greedy
    two = dict(scorer.scores([(context, (best, 7)), (context, (best, 8)), (context, (best + 1, 7))]))
    assert sum(c.is_greedy for c in two.values()) <= 1 and not two[2].is_greedy
    assert two[0].log_likelihood < found[best].log_likelihood


def test_a_long_context_loses_its_beginning(model):
    target, _, runtime = workbench.model(model, mmlu.Config().runtime)
    scorer = ContinuationScorer(target, runtime, rows=2)
    scorer.window = 2 * CHUNK
    context = tuple(i % 97 for i in range(600))
    found = dict(scorer.scores([(context, (1, 2, 3)), (context[-(2 * CHUNK - 2) :], (1, 2, 3))]))
    assert found[0] == found[1]
    with pytest.raises(KdjaxError, match="pair 0: the continuation has 600 tokens"):
        next(scorer.scores([((1,), context)]))
    for pair, empty in ((((), (1,)), "context"), (((1,), ()), "continuation")):
        with pytest.raises(KdjaxError, match=f"pair 0: the {empty} has no tokens"):
            next(scorer.scores([pair]))


def test_a_part_of_the_units_has_the_same_records(model):
    c = config(mmlu.Config, model, "mmlu", prompt={"shots": 0}, rows=2)
    units = mmlu.units(c)
    records = list(mmlu.measure(c, units))
    found = untimed(records)
    assert set(found) == set(units)
    for unit in units:
        [alone] = mmlu.measure(c, [unit])
        assert untimed([alone])[unit] == found[unit]
        assert found[unit]["choice"] == int(np.argmax(found[unit]["log_likelihoods"]))
        assert found[unit]["correct"] == (found[unit]["choice"] == found[unit]["expected"])
    said = mmlu.conclude([result("all", c, records, mmlu.METRICS)])
    assert said[0].startswith(f"all: {len(units)} questions, accuracy")
