"""Exactness: where two texts part, how close their scores are, and what is said about it."""

import re

import msgspec
import pytest

from kdjax.config import DecodeConfig
from kdjax.config.generate import ModelSection, RuntimeSection
from kdjax.evaluate import exactness, workbench
from kdjax.evaluate.divergence import Referee, margins
from kdjax.evaluate.exactness import Config
from kdjax.evaluate.forward import Forward
from kdjax.evaluate.workbench import PromptsSection
from kdjax.run.experiment import result
from tests.cli.conftest import tiny as tiny
from tests.tolerances import TARGET_LOGITS


@pytest.fixture(scope="module")
def config(tiny):
    return Config(
        model=ModelSection(target=str(tiny / "target"), drafter=str(tiny / "drafter")),
        decode=DecodeConfig(mode="tree", budget=4),
        prompts=PromptsSection(count=3, new_tokens=8),
        runtime=RuntimeSection(compute_dtype="float32"),
        slots=2,
    )


@pytest.fixture(scope="module")
def forward(config):
    models = workbench.pair(config.model, config.runtime)
    return Forward(models.target, models.runtime, context=128)


@pytest.fixture(scope="module")
def requests(config):
    return workbench.requests(config.prompts, workbench.pair(config.model, config.runtime).tokenizer)


@pytest.fixture(scope="module")
def records(config):
    return list(exactness.measure(config, exactness.units(config)))


def test_float32_gives_the_same_tokens(config, records):
    assert [record["unit"] for record in records] == exactness.units(config)
    assert all(record["identical"] == 1 and record["compared"] == 8 for record in records)
    found = result("tree", config, records, exactness.METRICS)
    assert found.value("identical") == 1 and found.value("partings_per_1000") == 0 and found.value("tau_micro") >= 1
    assert exactness.conclude([found]) == ["tree: all 3 outputs are those of plain decoding, as float32 requires"]


def test_a_unit_does_not_depend_on_the_others(config, records):
    assert list(exactness.measure(config, exactness.units(config)[1:2])) == records[1:2]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_parting_has_the_scores_of_both_tokens(config, records, forward, requests, tiny, temperature):
    request, tokens = requests[records[0]["unit"]], records[0]["token_ids"]
    config = msgspec.structs.replace(config, decode=DecodeConfig(mode="tree", budget=4, temperature=temperature))
    other = [*tokens[:5], (tokens[5] + 1) % 4096, *tokens[6:]]
    record = exactness._compared(config, forward, request, tokens, other)
    assert (record["identical"], record["compared"], record["thousandths"]) == (0, 6, 1000)
    parting = record["parting"]
    assert (parting["position"], parting["tokens"]) == (5, [tokens[5], other[5]])
    referee = Referee(tiny / "target")
    text = [*request.prompt_ids, *tokens[:5]]
    expected = referee.gap(text, (tokens[5], other[5]), temperature, request.seed)
    assert abs(parting["reference_margin"]) == pytest.approx(expected, rel=1e-9)
    TARGET_LOGITS.check(parting["margin"], parting["reference_margin"])
    if not temperature:  # the first token is the model's choice, hence none is above it
        assert parting["margin"] >= margins(forward.logits(text)[-1]) > 0


def test_a_text_that_ends_early_has_no_scores(config, records, forward, requests):
    request, tokens = requests[records[0]["unit"]], records[0]["token_ids"]
    parting = exactness._compared(config, forward, request, tokens, tokens[:6])["parting"]
    assert parting == {"position": 6, "tokens": [tokens[6]]}


def test_without_the_referee_the_reference_is_not_read(config, records, forward, requests):
    request, tokens = requests[records[0]["unit"]], records[0]["token_ids"]
    config = msgspec.structs.replace(config, referee=False)
    parting = exactness._compared(config, forward, request, tokens, [tokens[0] ^ 1, *tokens[1:]])["parting"]
    assert parting["position"] == 0 and "reference_margin" not in parting


@pytest.mark.parametrize(
    "float32, partings, said",
    [
        (False, [], "all 4 outputs are those of plain decoding .95 %: at most 49.0% of prompts part"),
        (True, [1e-6], "1 of 4 outputs part .* float32 does not tell apart .2e-05., which is allowed"),
        (
            True,
            [1e-6, 0.3],
            "NOT EXACT, though float32 requires it: 2 of 4 outputs part .*; more than rounding parts 'u1'$",
        ),
        (True, [None], "NOT EXACT, though float32 requires it: 1 of 4 outputs part"),
        (
            False,
            [0.1, 0.3],
            "2 of 4 .* a median of 0.2 .at most 0.3. in these numerics and .* in the float64 reference",
        ),
    ],
)
def test_verdicts(config, float32, partings, said):
    records = [{"unit": f"u{i}", "identical": 1, "float32": float32} for i in range(4)]
    for record, margin in zip(records, partings, strict=False):
        scores = {} if margin is None else {"margin": -margin, "reference_margin": margin}
        record |= {"identical": 0, "parting": {"position": 3, "tokens": [1, 2], **scores}}
    [finding] = exactness.conclude([result("cell", config, records, {})])
    assert re.search(said, finding)
