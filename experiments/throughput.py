"""Decode throughput by the number of concurrent streams, whose slots are refilled as requests end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from experiments import decoding
from experiments.decoding import Config as Config
from experiments.decoding import inputs as inputs
from kdjax.decode import Request
from kdjax.evaluate import workbench
from kdjax.run import plot
from kdjax.run.experiment import Result
from kdjax.run.ledger import Record

CLAIM = "CaDDTree (arXiv 2606.01813): what a draft tree is worth depends on the cost of verifying, hence on the load"
METRICS = decoding.SPEED | decoding.TAU
THIRDS = 3


def measure(config: Config) -> Iterator[Record]:
    """Of every three requests one asks for a third of the tokens and one for two thirds: slots do not end together."""
    tokenizer = workbench.pair(config.model, config.runtime).tokenizer
    requests = {
        name: staggered(request, i)
        for i, (name, request) in enumerate(workbench.requests(config.prompts, tokenizer).items())
    }
    context = workbench.context_for(list(requests.values()))
    decoder = workbench.decoder(config.model, config.runtime, config.decode, config.slots, context)
    yield from decoding.records(decoder, requests, config.repeats)


def staggered(request: Request, index: int) -> Request:
    tokens = max(1, request.max_new_tokens * (index % THIRDS + 1) // THIRDS)
    return msgspec.structs.replace(request, max_new_tokens=tokens)


def conclude(results: Sequence[Result]) -> list[str]:
    findings = []
    plain = {r.config.slots: r for r in results if not r.config.decode.budget}
    for mode, many in _modes(results).items():
        first, best = many[0], max(many, key=lambda r: r.value("tokens_per_s"))
        findings.append(
            f"{mode}: {first.value('tokens_per_s'):.0f} tok/s with {first.config.slots} stream(s), at most "
            f"{best.value('tokens_per_s'):.0f} with {best.config.slots}"
        )
        gains = {r.config.slots: _gain(r, plain[r.config.slots]) for r in many if r.config.slots in plain}
        if gains and many[0].config.decode.budget:
            said = ", ".join(f"{gain:.2f} at C={slots}" for slots, gain in gains.items())
            findings.append(f"{mode} runs at these multiples of plain decoding: {said}")
    refilled = [r.name for r in results if sum("token_ids" in record for record in r.records) > r.config.slots]
    findings.append(f"slots were refilled in {len(refilled)} of {len(results)} cells")
    return [*findings, decoding.same_tokens(results)]


def draw(results: Sequence[Result], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    for style, (mode, many) in enumerate(_modes(results).items()):
        slots = [r.config.slots for r in many]
        plot.line(left, slots, [r.estimates["tokens_per_s"] for r in many], style, mode)
        per_stream = [r.value("tokens_per_s") / r.config.slots for r in many]
        color, marker, dashes = plot.STYLES[style]
        right.plot(slots, per_stream, color=color, marker=marker, linestyle=dashes, label=mode)
    for axes in (left, right):
        plot.log_x(axes, [r.config.slots for r in results])
    left.set(xlabel="streams C", ylabel="tok/s, all streams", ylim=(0, None))
    right.set(xlabel="streams C", ylabel="tok/s per stream", ylim=(0, None))
    left.legend()


def _modes(results: Sequence[Result]) -> dict[str, list[Result]]:
    modes: dict[str, list[Result]] = {}
    for result in results:
        decode = result.config.decode
        name = f"{decode.mode} {decode.budget}" if decode.budget else "plain decoding"
        modes.setdefault(name, []).append(result)
    return {name: sorted(many, key=lambda r: r.config.slots) for name, many in modes.items()}


def _gain(result: Result, plain: Result) -> float:
    return result.value("tokens_per_s") / plain.value("tokens_per_s")
