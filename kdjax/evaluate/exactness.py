"""Speculative decoding against plain decoding of the same prompts: the same tokens, or where and why they part."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kdjax.bundled.locate import locate
from kdjax.config.decode import AtLeast1, DecodeConfig
from kdjax.config.generate import ModelSection, RuntimeSection
from kdjax.config.mesh import ONE_DEVICE, MeshConfig
from kdjax.decode import Request
from kdjax.evaluate import documents, workbench
from kdjax.evaluate.acceptance import TAU, acceptance_record
from kdjax.evaluate.divergence import ROUNDING, Referee, first_difference, perturbed
from kdjax.evaluate.forward import Forward
from kdjax.evaluate.workbench import PromptsSection
from kdjax.run import plot
from kdjax.run.experiment import Inputs, Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import Metric, wilson

CLAIM = "whether speculative decoding gives the tokens of plain decoding, and how close the scores are where it parts"
METRICS = {
    "identical": Metric(total="identical", share=True, definition="share of prompts with the tokens of plain decoding"),
    "partings_per_1000": Metric(
        total="thousandths", per="compared", definition="first differences per 1000 tokens up to them"
    ),
    **TAU,
}


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plain decoding runs in the same numerics as `decode`, over as many `slots`.

    `referee`: measure the scores where texts part by the float64 reference too, which holds all weights on the host.
    """

    model: ModelSection = ModelSection()
    decode: DecodeConfig = DecodeConfig()
    prompts: PromptsSection = PromptsSection()
    runtime: RuntimeSection = RuntimeSection()
    mesh: MeshConfig = ONE_DEVICE
    slots: AtLeast1 = 4
    referee: bool = True


def inputs(config: Config) -> Inputs:
    return workbench.inputs(config.model, config.runtime, config.decode, config.prompts, config.mesh)


def units(config: Config) -> list[str]:
    return [prompt.id for prompt in documents.read(config.prompts, "prompts")]


def measure(config: Config, units: Sequence[str]) -> Iterator[Record]:
    models = workbench.pair(config.model, config.runtime, config.mesh)
    requests = workbench.requests(config.prompts, models.tokenizer)
    context = workbench.context_for(list(requests.values()))
    plain, fast = (
        workbench.decoder(config.model, config.runtime, decode, config.slots, context, config.mesh)
        for decode in (msgspec.structs.replace(config.decode, mode="autoregressive", budget=0), config.decode)
    )
    forward = Forward(models.target, models.runtime, context=fast.context)
    for first in range(0, len(units), config.slots):
        names = units[first : first + config.slots]
        together = [requests[name] for name in names]
        for name, request, expected, found in zip(
            names, together, plain.generate(together), fast.generate(together), strict=True
        ):
            record = acceptance_record(name, found)
            record["float32"] = (models.runtime.compute_dtype, models.runtime.cache_dtype) == ("float32", "float32")
            yield record | _compared(config, forward, request, expected.token_ids, found.token_ids)


def _compared(
    config: Config, forward: Forward, request: Request, expected: Sequence[int], found: Sequence[int]
) -> Record:
    at = first_difference(expected, found)
    compared = len(expected) if at is None else at + 1
    record: Record = {"identical": int(at is None), "thousandths": 0 if at is None else 1000, "compared": compared}
    if at is not None:
        record["parting"] = {"position": at, **_parting(config, forward, request, expected, found, at)}
    return record


def _parting(
    config: Config, forward: Forward, request: Request, expected: Sequence[int], found: Sequence[int], at: int
) -> Record:
    """How far apart the scores of the two tokens are. One text may end where the other goes on: no scores then."""
    if at == min(len(expected), len(found)):
        return {"tokens": [*expected[at : at + 1], *found[at : at + 1]]}
    tokens = expected[at], found[at]
    text = [*request.prompt_ids, *expected[:at]]
    scores = perturbed(forward.logits(text)[-1], len(text), config.decode.temperature, request.seed)
    said: Record = {"tokens": list(tokens), "margin": float(scores[tokens[0]] - scores[tokens[1]])}
    if config.referee:
        referee = _referee(locate(config.model, needs_drafter=False)[0])
        scores = referee.scores(text, config.decode.temperature, request.seed)
        said["reference_margin"] = float(scores[tokens[0]] - scores[tokens[1]])
    return said


@functools.lru_cache(maxsize=1)
def _referee(folder: Path) -> Referee:
    return Referee(folder)


def conclude(results: Sequence[Result]) -> list[str]:
    return [f"{result.name}: {_verdict(result)}" for result in results]


def _verdict(result: Result) -> str:
    partings = [record["parting"] for record in result.records if "parting" in record]
    n, exact = len(result.records), result.records[0]["float32"]
    if not partings:
        bound = wilson(0, n)[1]
        return f"all {n} outputs are those of plain decoding" + (
            ", as float32 requires" if exact else f" (95 %: at most {bound:.1%} of prompts part)"
        )
    said = f"{len(partings)} of {n} outputs part from plain decoding{_margins(partings)}"
    if not exact:
        return said
    if worst := [record["unit"] for record in result.records if "parting" in record and not _is_rounding(record)]:
        return f"NOT EXACT, though float32 requires it: {said}; more than rounding parts {', '.join(map(repr, worst))}"
    return f"{said}; all of them at scores that float32 does not tell apart ({ROUNDING:g}), which is allowed"


def _is_rounding(record: Record) -> bool:
    margin = record["parting"].get("reference_margin")
    return margin is not None and abs(margin) < ROUNDING


def _margins(partings: Sequence[Record]) -> str:
    said = []
    for key, where in (("margin", "in these numerics"), ("reference_margin", "in the float64 reference")):
        gaps = [abs(parting[key]) for parting in partings if key in parting]
        if gaps:
            said.append(f"a median of {statistics.median(gaps):.2g} (at most {max(gaps):.2g}) {where}")
    return f", where the two tokens' scores are apart by {' and '.join(said)}" if said else ""


def draw(results: Sequence[Result], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    labels = [result.name.replace(" ", "\n") for result in results]
    plot.bars(left, labels, [result.estimates["identical"] for result in results])
    left.set(xlabel="share of identical outputs", xlim=(0, 1.02))
    left.tick_params(axis="y", labelsize=8)
    plot.bars(right, [""] * len(results), [result.estimates["tau_micro"] for result in results], 1)
    right.set(xlabel="tau micro, bonus included")
