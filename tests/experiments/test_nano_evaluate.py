"""The pieces of the evaluation that decide which numbers are reported."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.nano import acceptance, compressors, evaluate
from experiments.nano.acceptance import Output
from experiments.nano.config import Cell
from experiments.nano.tables import markdown
from kdjax.errors import KdjaxError
from kdjax.evaluate import Score, loops


def output(rounds=2, emitted=6, accepted=(2, 1, 1), loops=False, round_bytes=18, token_ids=(1, 2)):
    return Output(token_ids, rounds, emitted, accepted, round_bytes, loops)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 30), st.integers(1, 12))
def test_prompts_lie_inside_one_document(sizes, count, length):
    documents = [[100 * d + i for i in range(size)] for d, size in enumerate(sizes)]
    if max(sizes) < length:
        with pytest.raises(KdjaxError, match="prompt_len"):
            acceptance.prompts(documents, count, length)
        return
    chosen = acceptance.prompts(documents, count, length)
    assert len(chosen) == count
    for prompt in chosen:
        document = documents[prompt[0] // 100]
        start = prompt[0] % 100
        assert list(prompt) == document[start : start + length]


def test_prompts_are_spread_evenly():
    starts = [p[0] for p in acceptance.prompts([list(range(1000))], 10, 5)]
    assert starts == list(range(0, 1000, 100))


@pytest.mark.parametrize(
    "repeats, found",
    [(4, False), (5, True)],
)
def test_loop_is_an_eight_gram_more_than_four_times(repeats, found):
    gram = list(range(8))
    filler = list(range(100, 164))
    text = [t for i in range(repeats) for t in [*gram, 200 + i]]
    assert loops.is_loop(filler + text) == found
    assert not loops.is_loop(text + filler)  # only the last 64 tokens count


@pytest.mark.parametrize("period, found", [(20, True), (64, True), (65, False)])
def test_repetition_of_long_period(period, found):
    text = [t % period for t in range(192)]
    assert loops.repeats(text) == found and loops.is_loop(text) is False
    few = [t if i % 8 else 1000 + i for i, t in enumerate(text)]  # an eighth differs, so each lag agrees on 77 %
    assert not loops.repeats(few)
    assert not loops.repeats(text[:64])


def test_short_outputs_do_not_loop():
    assert not loops.is_loop([7] * 11)
    assert loops.is_loop([7] * 12)
    assert not loops.is_loop([])


def test_summary_pools_rounds():
    a, b = output(), output(rounds=8, emitted=8, accepted=(0, 0, 0), round_bytes=22)
    s = acceptance.summary([a, b])
    assert (s.prompts, s.rounds) == (2, 10)
    assert s.tau_micro == 1.4 and s.tau_macro == 2.0 and s.bytes_per_verify == 4.0
    assert s.acceptance_by_depth == (0.2, 0.5, 1.0)
    assert acceptance.summary([]) is None


def test_compressors_see_the_bytes():
    text = b"def f(x):\n    return x\n" * 200
    noise = np.random.default_rng(0).bytes(len(text))
    assert compressors.xz_bytes(text) < len(text) / 10 < len(noise) <= compressors.xz_bytes(noise)
    if shutil.which("zpaq"):
        packed = compressors.zpaq_bytes(noise)
        assert packed is not None and len(noise) <= packed < 1.02 * len(noise)
    else:
        assert compressors.zpaq_bytes(text) is None


def test_measurements_are_kept_and_not_mixed(tmp_path):
    calls = []
    file = tmp_path / "x.json"

    def measure():
        calls.append(1)
        return {"a": 1}

    assert evaluate.remember(file, dict, measure) == evaluate.remember(file, dict, measure) == {"a": 1}
    assert calls == [1] and json.loads(file.read_text()) == {"a": 1}
    with pytest.raises(KdjaxError, match="another --out"):
        evaluate.remember(file, dict, measure, expected={"a": 2})


class FixedGap:
    def __init__(self, gap):
        self.value, self.asked = gap, []

    def gap(self, text, tokens, temperature, seed):
        self.asked.append((text, tokens, temperature, seed))
        return self.value


CELLS = [Cell(mode="chain", budget=7), Cell(mode="tree", budget=15), Cell(mode="tree", budget=15, temperature=0.7)]


def parted(chain, tree, referee):
    outputs = [{"py_x": [output(), output(token_ids=ids)]} for ids in (chain, tree, (9, 9))]
    by_cell = {cell.name: many for cell, many in zip(CELLS, outputs, strict=True)}
    return evaluate.partings(CELLS, by_cell, {"py_x": [(5,), (6, 7)]}, 100, referee)


def test_modes_are_compared_at_the_same_temperature_only():
    assert parted((1, 2, 3), (1, 2, 3), FixedGap(0.0)) == []


def test_equal_scores_may_part_modes():
    referee = FixedGap(1e-6)
    (found,) = parted((1, 2, 3), (1, 4), referee)
    assert (found.domain, found.prompt, found.after, found.tokens, found.gap) == ("py_x", 1, 1, (2, 4), 1e-6)
    assert referee.asked == [((6, 7, 1), (2, 4), 0.0, 101)]


def test_other_scores_may_not():
    with pytest.raises(KdjaxError, match="tree-15-T0, py_x, prompt 1: token 1"):
        parted((1, 2, 3), (1, 4, 3), FixedGap(1e-3))
    with pytest.raises(KdjaxError, match="ends elsewhere"):
        parted((1, 2, 3), (1, 2), FixedGap(0.0))


def test_tables_show_what_was_measured():
    entry = evaluate.acceptance_entry([output(), output(loops=True, rounds=1, emitted=8, accepted=(1, 1, 1))])
    bits = evaluate.bits_entry(
        [evaluate.Bits((Score(8.0, 8, 2),), 16, None), evaluate.Bits((Score(20.0, 6, 2), Score(4.0, 2, 1)), 4, 3)]
    )
    cell = Cell(mode="tree", budget=15)
    text = markdown({"bits_per_byte": {"py_x": bits}, "acceptance": {cell.name: {"py_x": entry}}}, [cell], ["py_x"])
    assert "| py_x | 0 | 2.000 | - | 10.000 |" in text  # zpaq is missing for a part, so there is no sum
    assert "| text | tree 15, T 0 | loops, T 0 |" in text and "| py_x | 3.00 (4.67) | 50% |" in text
    assert "| tree 15, T 0, no loops | 3.00 | 3.00 | 9.0 | 1 | 2 | 100 50 100 |" in text
