"""TruthfulQA, single true answer (MC1, arXiv 2109.07958): the most likely of the answers to a question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kdjax.evaluate.benchmarks import choices
from kdjax.evaluate.benchmarks.choices import Asked
from kdjax.evaluate.benchmarks.choices import Config as Config

CLAIM = "TruthfulQA MC1: share of questions whose true answer is the most likely one"


class Question(msgspec.Struct, frozen=True):
    id: str
    question: str
    choices: list[str]
    expected_index: int

    def __post_init__(self) -> None:
        if not 0 <= self.expected_index < len(self.choices):
            raise ValueError(f"expected_index = {self.expected_index} is not one of {len(self.choices)} choices")

    def name(self, index: int) -> str:
        return self.id


class TruthfulQA:
    name = "truthfulqa"
    file = "TruthfulQA MC1 as JSON lines with the keys id, question, choices and expected_index"
    kinds: Sequence[type[Any]] = (Question,)
    shots = 0

    def shots_for(self, item: Any, examples: Sequence[Any]) -> list[Any]:
        return list(examples)

    def ask(self, item: Any, shots: Sequence[Any]) -> Asked:
        solved = [f"{_question(shot)} {shot.choices[shot.expected_index]}\n\n" for shot in shots]
        return Asked("".join(solved) + _question(item), [f" {choice}" for choice in item.choices], item.expected_index)


def _question(item: Any) -> str:
    return f"Q: {item.question}\nA:"


_evaluation = choices.Evaluation(TruthfulQA())
METRICS = choices.ACCURACY
inputs, units, measure = _evaluation.inputs, _evaluation.units, _evaluation.measure
conclude, draw = _evaluation.conclude, _evaluation.draw
