"""How deep drafts are accepted: per depth given the depth before, and the length of what a round commits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from experiments import decoding
from experiments.decoding import Config as Config
from experiments.decoding import inputs as inputs
from kdjax.run import plot
from kdjax.run.experiment import Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import Estimate, Metric, estimate

CLAIM = "DDTree (arXiv 2604.12989), figure 4: trees move rounds from short accepted lengths to long ones"
METRICS = decoding.TAU | {
    "nothing_accepted": Metric(
        total="none", per="rounds", definition="share of rounds that commit the bonus token alone"
    ),
    "all_accepted": Metric(total="all", per="rounds", definition="share of rounds that accept the whole drafted depth"),
}


def measure(config: Config) -> Iterator[Record]:
    for record in decoding.measure(config):
        if "accepted_by_depth" in record:
            accepted = record["accepted_by_depth"]
            record["none"] = record["rounds"] - (accepted[0] if accepted else 0)
            record["all"] = accepted[-1] if accepted else 0
        yield record


def conclude(results: Sequence[Result]) -> list[str]:
    findings = []
    for result in results:
        reached = [e for e in _given_the_depth_before(result) if e.n]
        if reached:
            last = len(reached)
            findings.append(
                f"{result.name}: depth 1 is accepted in {reached[0].value:.0%} of rounds, depth {last} in "
                f"{reached[-1].value:.0%} of the rounds that got so far"
            )
    for chain, tree in _pairs(results):
        before, after = (
            [f"{r.value(metric):.0%}" for metric in ("nothing_accepted", "all_accepted")] for r in (chain, tree)
        )
        decode = tree.config.decode
        findings.append(
            f"at temperature {decode.temperature:g} the tree of {decode.budget} nodes brings the rounds that accept "
            f"nothing from {before[0]} to {after[0]} and those that accept everything from {before[1]} to {after[1]}"
        )
    return [*findings, decoding.loops(results)]


def draw(results: Sequence[Result], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    width = 0.8 / len(results)
    for i, result in enumerate(results):
        by_depth = _given_the_depth_before(result)
        plot.line(left, range(1, len(by_depth) + 1), by_depth, i, result.name)
        lengths = _lengths(result)
        places = [length + 1 + (i - (len(results) - 1) / 2) * width for length in range(len(lengths))]
        right.bar(places, lengths, width, color=plot.STYLES[i % len(plot.STYLES)][0])
    left.set(xlabel="depth", ylabel="accepted, given the depth before", ylim=(0, 1.02))
    left.legend(fontsize=8, loc="lower left")
    right.set(xlabel="tokens that a round commits, bonus included", ylabel="share of rounds")


def _given_the_depth_before(result: Result) -> list[Estimate]:
    """One per depth; the intervals are over the prompts that got so far, whose number is `n`."""
    records = [r for r in result.records if "accepted_by_depth" in r]
    found = []
    for d in range(len(records[0]["accepted_by_depth"])):
        rows = [
            {"unit": r["unit"], "now": r["accepted_by_depth"][d], "before": before}
            for r in records
            if (before := [r["rounds"], *r["accepted_by_depth"]][d])
        ]
        found.append(estimate(Metric(total="now", per="before"), rows) or Estimate(0.0, None, None, 0))
    return found


def _lengths(result: Result) -> list[float]:
    """Share of rounds that accept 0, 1, ... drafted tokens."""
    records = [r for r in result.records if "accepted_by_depth" in r]
    rounds = sum(r["rounds"] for r in records)
    by_depth = [sum(at) for at in zip(*(r["accepted_by_depth"] for r in records), strict=True)]
    return [(a - b) / max(rounds, 1) for a, b in itertools.pairwise([rounds, *by_depth, 0])]


def _pairs(results: Sequence[Result]) -> list[tuple[Result, Result]]:
    """Chain and tree of the same temperature."""
    chains = {r.config.decode.temperature: r for r in results if r.config.decode.mode == "chain"}
    trees = [r for r in results if r.config.decode.mode == "tree" and r.config.decode.temperature in chains]
    return [(chains[t.config.decode.temperature], t) for t in trees]
