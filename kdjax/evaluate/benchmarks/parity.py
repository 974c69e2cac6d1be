"""What the cells of a benchmark say alone and in pairs: does speculation change the answers?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdjax.run import plot
from kdjax.run.experiment import Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import Metric, difference

SHARES = ("accuracy", "strict", "accuracy_normalised", "pass_at_1", "pass_at_k", "truncated")
ACCURACY = Metric(total="correct", share=True)
PASS_AT_1 = Metric(total="pass_at_1")


def conclude(results: Sequence[Result]) -> list[str]:
    """A sentence per cell, then one per pair of cells that answered the same prompts."""
    return [*map(_alone, results), *_pairs(results)]


def draw(results: Sequence[Result], figure: Any, title: str) -> None:
    axes = figure.subplots()
    estimates = [result.estimates[_headline(result)] for result in results]
    plot.bars(axes, [result.name for result in results], estimates)
    axes.set(xlabel=_headline(results[0]), title=title)


def _headline(result: Result) -> str:
    return "accuracy" if "accuracy" in result.estimates else "pass_at_1"


def _alone(result: Result) -> str:
    said = []
    for name in SHARES:
        if estimate := result.estimates.get(name):
            bounds = (
                "" if estimate.low is None or estimate.high is None else f" ({estimate.low:.1%} to {estimate.high:.1%})"
            )
            said.append(f"{name.replace('_', ' ')} {estimate.value:.1%}{bounds if name == _headline(result) else ''}")
    cut = [sample["finish_reason"] == "length" for record in result.records for sample in record.get("samples", ())]
    if cut:
        said.append(f"{sum(cut)} of {len(cut)} outputs cut at new_tokens")
    return f"{result.name}: {len(result.records)} questions, {', '.join(said)}"


def _pairs(results: Sequence[Result]) -> Iterator[str]:
    for a, b in itertools.combinations(results, 2):
        left, right = ({record["unit"]: record for record in result.records} for result in (a, b))
        if left.keys() == right.keys() and all(
            left[unit]["prompt_sha256"] == right[unit]["prompt_sha256"] for unit in left
        ):
            yield f"{b.name} against {a.name}: {_compared(left, right)}"


def _compared(left: Mapping[str, Record], right: Mapping[str, Record]) -> str:
    same = sum(_answers(left[unit]) == _answers(right[unit]) for unit in left)
    said = f"identical answers to {same} of {len(left)} questions"
    records = list(left.values()), list(right.values())
    found = difference(ACCURACY, *records) or difference(PASS_AT_1, *records)
    if found is None:
        return said
    said += f", accuracy {100 * found.difference:+.1f} points"
    if found.low is not None and found.high is not None:
        said += f" (95 %: {100 * found.low:+.1f} to {100 * found.high:+.1f})"
    if found.p is not None:
        gained, lost = (
            sum(bool(b[unit]["correct"]) and not a[unit]["correct"] for unit in left)
            for a, b in ((left, right), (right, left))
        )
        said += f", {gained} gained and {lost} lost (McNemar p = {found.p:.3g})"
    return said


def _answers(record: Record) -> object:
    if "samples" in record:
        return [(sample["output"], sample["finish_reason"]) for sample in record["samples"]]
    return record["choice"]
