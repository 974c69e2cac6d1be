"""Decodes prompts and keeps what acceptance and speed are computed from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kdjax.cli.report import Outcome
from kdjax.config.decode import AtLeast1, DecodeConfig
from kdjax.config.generate import ModelSection, RuntimeSection
from kdjax.decode import Completion, Decoder, Request
from kdjax.evaluate import workbench
from kdjax.evaluate.acceptance import TAU as TAU
from kdjax.evaluate.acceptance import acceptance_record
from kdjax.run.experiment import Inputs, Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import Metric

SPEED = {
    "tokens_per_s": Metric(
        total="timed_tokens",
        per="decode_s",
        definition="tokens of verify passes per second of decoding, all streams together; without prefill and "
        "compilation; of several repetitions the fastest",
    ),
}


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`slots` prompts at once. Each prompt is decoded `repeats` times; only the times of the repetitions differ."""

    model: ModelSection = ModelSection()
    decode: DecodeConfig = DecodeConfig()
    prompts: workbench.PromptsSection = workbench.PromptsSection()
    runtime: RuntimeSection = RuntimeSection()
    slots: AtLeast1 = 1
    repeats: AtLeast1 = 1


def inputs(config: Config) -> Inputs:
    return workbench.inputs(config.model, config.runtime, config.decode, config.prompts)


def measure(config: Config) -> Iterator[Record]:
    tokenizer = workbench.pair(config.model, config.runtime).tokenizer
    requests = workbench.requests(config.prompts, tokenizer)
    context = workbench.context_for(list(requests.values()))
    decoder = workbench.decoder(config.model, config.runtime, config.decode, config.slots, context)
    yield from records(decoder, requests, config.repeats)


def decode_all(decoder: Decoder, requests: Sequence[Request]) -> Outcome:
    completions: dict[int, Completion] = {}
    slots: dict[int, int] = {}
    for commit in decoder.stream(requests):
        completions[commit.request], slots[commit.request] = commit.so_far, commit.slot
    order = range(len(requests))
    return Outcome([completions[i] for i in order], [slots[i] for i in order])


def records(decoder: Decoder, requests: Mapping[str, Request], repeats: int) -> Iterator[Record]:
    """One record a prompt; with several slots, whose times overlap, one more a repetition for the speed."""
    outcomes = [decode_all(decoder, list(requests.values())) for _ in range(repeats)]
    return records_of(outcomes, list(requests), decoder.slots)


def records_of(outcomes: Sequence[Outcome], names: Sequence[str], slots: int) -> Iterator[Record]:
    """`records` of repetitions that were run already."""
    for i, name in enumerate(names):
        runs = [outcome.begun[i] for outcome in outcomes]
        record = acceptance_record(name, runs[0])
        record["timings"] = {"prefill_s": min(run.timings.prefill for run in runs)}
        if slots == 1:
            record["timed_tokens"] = record["emitted"]
            record["timings"]["decode_s"] = min(run.timings.decode for run in runs)
        yield record
    if slots > 1:
        for i, outcome in enumerate(outcomes):
            timings = {"decode_s": outcome.decode_seconds}
            yield {"unit": f"repetition {i}", "timed_tokens": outcome.statistics.emitted, "timings": timings}


def same_tokens(results: Sequence[Result]) -> str:
    """Whether all cells gave each prompt the same tokens, as a sentence."""
    texts: dict[str, set[tuple[int, ...]]] = {}
    for record in (record for result in results for record in result.records if "token_ids" in record):
        texts.setdefault(record["unit"], set()).add(tuple(record["token_ids"]))
    same = sum(len(different) == 1 for different in texts.values())
    return f"the tokens of {same} of {len(texts)} prompts are the same in every one of {len(results)} cell(s)"


def loops(results: Sequence[Result]) -> str:
    """How many outputs run in circles, which flatters every drafter."""
    flags = [record["loops"] for result in results for record in result.records if "loops" in record]
    return (
        f"{sum(flags)} of {len(flags)} outputs end in a loop, whose drafts are accepted more easily; tau includes them"
    )
