"""The adapter, used by lm-evaluation-harness itself on tasks that are defined on local files."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

import lm_eval
from lm_eval.api.instance import Instance

from kdjax.config import DecodeConfig
from kdjax.config.generate import ModelSection
from kdjax.errors import KdjaxError
from kdjax.evaluate.lm_eval import KdjaxLM
from tests.cli.conftest import tiny as tiny

pytestmark = pytest.mark.filterwarnings("default")  # those of the harness are not ours


@pytest.fixture(scope="module")
def lm(tiny):
    model = ModelSection(target=str(tiny / "target"), drafter=str(tiny / "drafter"))
    return KdjaxLM(model, decode=DecodeConfig(mode="tree", budget=6), slots=2, rows=2, max_gen_toks=8)


def asked(kind, *many):
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(many)]


def generated(lm, *many):
    return lm.generate_until(asked("generate_until", *many))


def test_likelihoods_agree_with_each_other(lm):
    text = "import json\nprint(json.dumps(1))"
    [rolling] = lm.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)))
    pairs = (("", text), ("import json", "\nprint(json.dumps(1))"), ("", "import json"))
    (whole, greedy), (rest, _), (first, _) = lm.loglikelihood(asked("loglikelihood", *pairs))
    np.testing.assert_allclose(whole, rolling, rtol=1e-5)
    assert not greedy and whole < first < 0 and rest < 0 and not math.isclose(whole, rest)


def test_generation_stops_and_is_greedy(lm):
    settings = {"until": ["never there"], "do_sample": False, "max_gen_toks": 6}
    one, other = generated(lm, ("import", settings), ("x = ", settings | {"until": "nor there"}))
    assert one and other and one != other
    stop = next(letter for letter in one if letter.isascii() and letter.isalpha())
    assert generated(lm, ("import", settings | {"until": [stop]})) == [one[: one.index(stop)]]
    [warm, again] = generated(
        lm, ("import", settings | {"do_sample": True}), ("import", {"temperature": 1.0, "max_gen_toks": 6})
    )
    assert len({one, warm, again}) == 3  # request i draws with seed + i
    with pytest.raises(KdjaxError, match="generation_kwargs has 'num_beams'"):
        generated(lm, ("import", {"num_beams": 2}))
    with pytest.raises(KdjaxError, match="max_gen_toks = 2048"):
        generated(lm, ("import", {"max_gen_toks": 2048}))
    assert len(generated(lm, ("word " * 3000, settings))) == 1


def test_thinking_is_for_chat_only(tiny):
    model = ModelSection(target=str(tiny / "target"), drafter=str(tiny / "drafter"))
    lm = KdjaxLM(model, decode=DecodeConfig(mode="tree", budget=6), slots=1, rows=1, max_gen_toks=4, thinking=True)
    for ask in (
        lambda: generated(lm, ("import", {})),
        lambda: lm.loglikelihood(asked("loglikelihood", ("import", " json"))),
        lambda: lm.loglikelihood(asked("loglikelihood", ("", "import json"))),
    ):
        with pytest.raises(KdjaxError, match="thinking=True is for chat only: pass apply_chat_template=True"):
            ask()
    prompt = lm.apply_chat_template([{"role": "user", "content": "import"}])
    assert generated(lm, (prompt, {})) == [""]  # four tokens do not end the reasoning


def test_a_harness_run_over_local_files(lm, tmp_path):
    data = tmp_path / "data.jsonl"
    docs = [{"q": f"{a}+{b}=", "a": str(a + b), "c": [str(a + b), "zero"]} for a, b in ((1, 1), (2, 3), (4, 4))]
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    choice = common | {
        "task": "sums_choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "c",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    written = common | {
        "task": "sums_written",
        "output_type": "generate_until",
        "doc_to_target": "a",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    found = lm_eval.simple_evaluate(lm, tasks=[choice, written], bootstrap_iters=0, log_samples=True)
    assert {doc["doc"]["q"] for doc in found["samples"]["sums_choice"]} == {doc["q"] for doc in docs}
    expected = lm.loglikelihood(asked("loglikelihood", *((d["q"], f" {c}") for d in docs for c in d["c"])))
    right = sum(expected[2 * i][0] > expected[2 * i + 1][0] for i in range(3)) / 3
    assert found["results"]["sums_choice"]["acc,none"] == pytest.approx(right)
    assert found["results"]["sums_written"]["exact_match,none"] == 0
    texts = [sample["resps"][0][0] for sample in found["samples"]["sums_written"]]
    assert texts == generated(lm, *((d["q"], {"until": ["\n"], "max_gen_toks": 4}) for d in docs)) and all(texts)
