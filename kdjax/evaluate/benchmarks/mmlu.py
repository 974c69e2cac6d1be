"""MMLU: multiple choice in 57 subjects (arXiv 2009.03300), by the log-likelihood of the letter after `Answer:`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kdjax.evaluate.benchmarks import choices
from kdjax.evaluate.benchmarks.choices import Asked
from kdjax.evaluate.benchmarks.choices import Config as Config

CLAIM = "MMLU: share of questions for which the right letter is the most likely one"

LETTERS = "ABCD"


class Question(msgspec.Struct, frozen=True):
    """A line of the published data as JSON. `answer` is a letter or its index from 0."""

    question: str
    choices: list[str]
    answer: int | str
    subject: str

    def __post_init__(self) -> None:
        if len(self.choices) != len(LETTERS):
            raise ValueError(f"{len(self.choices)} choices instead of {len(LETTERS)}")
        if self.answer not in (*LETTERS, *range(len(LETTERS))):
            raise ValueError(f"answer = {self.answer!r} is neither one of {', '.join(LETTERS)} nor 0 to 3")

    def name(self, index: int) -> str:
        return f"{self.subject}/{index}"

    @property
    def right(self) -> int:
        return LETTERS.index(self.answer) if isinstance(self.answer, str) else self.answer


class Mmlu:
    name = "mmlu"
    file = "MMLU's test split as JSON lines with the keys question, choices, answer and subject"
    kinds: Sequence[type[Any]] = (Question,)
    shots = 5

    def shots_for(self, item: Any, examples: Sequence[Any]) -> list[Any]:
        return [example for example in examples if example.subject == item.subject]

    def ask(self, item: Any, shots: Sequence[Any]) -> Asked:
        subject = item.subject.replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        solved = [f"{_question(shot)} {LETTERS[shot.right]}\n\n" for shot in shots]
        return Asked(head + "".join(solved) + _question(item), [f" {letter}" for letter in LETTERS], item.right)


def _question(item: Any) -> str:
    lines = [f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, item.choices, strict=True)]
    return f"{item.question.strip()}\n{''.join(lines)}Answer:"


_evaluation = choices.Evaluation(Mmlu())
METRICS = choices.ACCURACY
inputs, units, measure = _evaluation.inputs, _evaluation.units, _evaluation.measure
conclude, draw = _evaluation.conclude, _evaluation.draw
