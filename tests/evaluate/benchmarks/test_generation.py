"""Whole evaluations on a random model: its answers are noise, but all that is around them is real."""

import gzip
import hashlib
import json
import re

import msgspec
import pytest

from kdjax.config.decode import DecodeConfig
from kdjax.config.generate import ModelSection
from kdjax.config.mesh import ONE_DEVICE
from kdjax.decode import Completion, Request
from kdjax.decode.completion import Statistics, Timings
from kdjax.errors import KdjaxError
from kdjax.evaluate import workbench
from kdjax.evaluate.benchmarks import generation, gsm8k, hellaswag, humaneval, mmlu
from kdjax.evaluate.completions import Answer, Ask, complete, stopping
from kdjax.run.experiment import Evaluation, result
from tests.cli.conftest import tiny as tiny
from tests.evaluate.benchmarks.samples import MINIATURES

MODES = {"autoregressive": 0, "tree": 6}


@pytest.fixture(scope="module")
def model(tiny):
    return ModelSection(target=str(tiny / "target"), drafter=str(tiny / "drafter"))


def config(kind, model, name, **settings):
    return msgspec.convert(
        {"path": str(MINIATURES / f"{name}.jsonl"), "model": msgspec.to_builtins(model)} | settings, kind
    )


def untimed(records):
    return {r["unit"]: {key: value for key, value in r.items() if key != "timings"} for r in records}


@pytest.fixture
def scripted(monkeypatch):
    """Puts texts in the place of what a model would write."""

    def script(*texts):
        def answers(decoder, tokenizer, asks):
            statistics, timings = Statistics(2, 4, (2, 0, 0)), Timings(0.1, 0.2, 0.3)
            for i, (text, _) in reversed(list(enumerate(zip(texts, asks, strict=True)))):
                yield i, Answer(text, "stop", Completion((1,), "stop", statistics, timings))

        monkeypatch.setattr(generation, "complete", answers)

    return script


def test_modes_give_the_same_answers_and_a_part_of_the_units_the_same_records(model):
    found, results = {}, []
    for mode, budget in MODES.items():
        c = config(
            gsm8k.Config,
            model,
            "gsm8k",
            decode={"mode": mode, "budget": budget},
            prompt={"shots": 0},
            new_tokens=12,
            slots=2,
        )
        units = gsm8k.units(c)
        records = list(gsm8k.measure(c, units))
        assert sorted(r["unit"] for r in records) == sorted(units) == [f"gsm8k/{i}" for i in range(3)]
        found[mode] = untimed(records)
        results.append(result(mode, c, records, gsm8k.METRICS))
        last = units[-1:]
        assert untimed(gsm8k.measure(c, last)) == {unit: found[mode][unit] for unit in last}
    for unit, record in found["tree"].items():
        plain = found["autoregressive"][unit]
        assert record["samples"] == plain["samples"] and len(record["samples"][0]["output"]) > 0
        assert record["prompt_sha256"] == plain["prompt_sha256"] and plain["tau"] == 1
        assert record["emitted"] == plain["emitted"] == plain["rounds"] == 11
    said = gsm8k.conclude(results)
    assert len(said) == 3 and "identical answers to 3 of 3" in said[2]


def test_chat_prompt_hash_and_unfinished_thinking(model, scripted):
    scripted("36 less 6</think>So \\boxed{30}.", "4000 by", "It is</think>2")
    hashes = {}
    for thinking in (False, True):
        c = config(gsm8k.Config, model, "gsm8k", prompt={"style": "chat", "thinking": thinking}, new_tokens=4)
        records = untimed(gsm8k.measure(c, gsm8k.units(c)))
        hashes[thinking] = records["gsm8k/0"]["prompt_sha256"]
        keys = ("thinking", "correct", "strict", "truncated")
        assert [tuple(map(float, map(r.get, keys))) for r in (records[f"gsm8k/{i}"] for i in range(3))] == [
            (thinking, 1, 1, 0),
            (thinking, not thinking, 0, thinking),
            (thinking, 0, 0, 0),
        ]
    question = json.loads((MINIATURES / "gsm8k.jsonl").read_text().splitlines()[0])["question"]
    text = (
        f"<|im_user|>user<|im_middle|>{question}\nPlease reason step by step, and put your final answer within "
        "\\boxed{}.<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    )
    assert hashes[True] == hashlib.sha256(text.encode()).hexdigest()
    assert hashes[False] == hashlib.sha256(f"{text}</think>".encode()).hexdigest()


def test_several_samples(model, scripted):
    right = "    return max((b - a for a, b in zip(sorted(values), sorted(values)[1:])), default=0)\n"
    scripted("    return 5\n", right, "    return\n")
    c = config(
        humaneval.Config,
        model,
        "humaneval",
        count=1,
        samples=3,
        k=2,
        allow_code_execution=True,
        decode={"temperature": 1.0},
    )
    [record] = humaneval.measure(c, humaneval.units(c))
    assert [sample["outcome"] for sample in record["samples"]] == ["wrong", "passed", "wrong"]
    assert record["pass_at_1"] == pytest.approx(1 / 3) and record["pass_at_k"] == pytest.approx(2 / 3)
    assert "correct" not in record and (record["rounds"], record["emitted"], record["tau"]) == (6, 12, 2)
    assert "pass at k 66.7%" in humaneval.conclude([result("all", c, [record], humaneval.METRICS)])[0]


@pytest.mark.parametrize("module", [gsm8k, humaneval, mmlu, hellaswag])
def test_modules_are_evaluations(module):
    assert isinstance(module, Evaluation)


@pytest.mark.parametrize(
    "module, name, settings, error",
    [
        (gsm8k, "gsm8k", {"path": ""}, "path is not set: gsm8k needs the test split of GSM8K"),
        (gsm8k, "gsm8k", {"skip": 3}, "has 3 questions, skip = 3 and count = None"),
        (gsm8k, "gsm8k", {"count": 4}, "has 3 questions, skip = 0 and count = 4"),
        (gsm8k, "gsm8k", {}, "prompt.shots_path is not set: gsm8k shows 5 solved examples"),
        (humaneval, "humaneval", {}, "allow_code_execution = false"),
        (mmlu, "mmlu", {}, "prompt.shots_path is not set: mmlu shows 5 solved examples"),
    ],
)
def test_what_is_missing_is_said_at_the_start(module, name, settings, error, model):
    with pytest.raises(KdjaxError, match=error):
        module.inputs(config(module.Config, model, name, **settings))


@pytest.mark.parametrize(
    "prompt, error",
    [
        ({"shots": 6, "shots_path": "gsm8k_train.jsonl"}, "has 5 of 6 prompt.shots"),
        ({"shots": 1, "shots_path": "gsm8k.jsonl"}, "question 'gsm8k/0' is shown solved before itself"),
    ],
)
def test_shots_that_cannot_be(prompt, error, model):
    prompt |= {"shots_path": str(MINIATURES / prompt["shots_path"])}
    c = config(gsm8k.Config, model, "gsm8k", prompt=prompt)
    with pytest.raises(KdjaxError, match=error):
        next(gsm8k.measure(c, gsm8k.units(c)))


def test_a_question_that_is_too_long_is_named(model):
    c = config(gsm8k.Config, model, "gsm8k", prompt={"shots": 0}, new_tokens=2040)
    with pytest.raises(KdjaxError, match="question 'gsm8k/0': .* prompt tokens and new_tokens = 2040 exceed"):
        next(gsm8k.measure(c, gsm8k.units(c)))


def test_a_question_that_is_there_twice(model, tmp_path):
    line = (MINIATURES / "humaneval.jsonl").read_text().splitlines()[0]
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(f"{line}\n{line}\n".encode()))
    c = config(humaneval.Config, model, "humaneval", path=str(tmp_path / "x.jsonl.gz"))
    with pytest.raises(KdjaxError, match="the question 'Mini/0' is there twice"):
        humaneval.units(c)


def test_stop_strings_end_texts_and_figures_where_they_stand(model):
    runtime = gsm8k.Config().runtime
    pair = workbench.pair(model, runtime)
    prompts = [tuple(pair.tokenizer.encode(text)) for text in ("one", "another one", "x")]
    requests = [Request(prompt_ids=p, max_new_tokens=16) for p in prompts]
    whole = {}
    for mode, budget in MODES.items():
        decode = stopping(DecodeConfig(mode=mode, budget=budget))
        decoder = workbench.decoder(model, runtime, decode, 2, 64, ONE_DEVICE)
        whole = {i: a.text for i, a in complete(decoder, pair.tokenizer, [Ask(r) for r in requests])}
        # from the middle of each text, so that some lie across tokens
        stops = {i: re.findall(r"[ -~]{3}", text[len(text) // 3 :])[0] for i, text in whole.items()}
        asks = [Ask(request, (stops[i], "never there")) for i, request in enumerate(requests)]
        together = dict(complete(decoder, pair.tokenizer, asks))
        alone = {i: next(complete(decoder, pair.tokenizer, [ask]))[1] for i, ask in enumerate(asks)}
        for i, answer in together.items():
            assert answer.text == whole[i][: whole[i].index(stops[i])] and answer.finish_reason == "stop"
            assert answer.completion.statistics == alone[i].completion.statistics
            assert answer.completion.token_ids == alone[i].completion.token_ids
            rounds = answer.completion.statistics.rounds
            if mode == "autoregressive":
                assert rounds == len(answer.completion.token_ids) - 1 < 15
    with pytest.raises(ValueError, match="rounds_per_call=1"):
        next(
            complete(
                workbench.decoder(model, runtime, DecodeConfig(mode="autoregressive"), 2, 64), pair.tokenizer, asks
            )
        )


def test_plain_decoding_needs_no_drafter(tiny, scripted):
    scripted("30")
    alone = ModelSection(target=str(tiny / "target"))
    c = config(gsm8k.Config, alone, "gsm8k", decode={"mode": "autoregressive"}, prompt={"shots": 0}, count=1)
    assert list(gsm8k.inputs(c).checkpoints) == ["target"]
    assert [record["correct"] for record in gsm8k.measure(c, gsm8k.units(c))] == [1]
    trees = config(gsm8k.Config, alone, "gsm8k", prompt={"shots": 0})
    with pytest.raises(KdjaxError, match="comes without a drafter"):
        gsm8k.inputs(trees)
