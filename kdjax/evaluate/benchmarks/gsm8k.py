"""GSM8K: word problems of school arithmetic (arXiv 2110.14168), asked for a boxed answer or after solved examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kdjax.evaluate.benchmarks import generation
from kdjax.evaluate.benchmarks.answers import last_boxed, last_number, marked_number, plain_number
from kdjax.evaluate.benchmarks.generation import Config as Config
from kdjax.evaluate.benchmarks.task import BOXED, Prompt, Style

CLAIM = "GSM8K: share of word problems whose final number is right"


class Upstream(msgspec.Struct, frozen=True):
    """A line of the published files. `answer` is the solution, which ends with `#### NUMBER`."""

    question: str
    answer: str

    def name(self, index: int) -> str:
        return f"gsm8k/{index}"

    @property
    def expected(self) -> str | None:
        return marked_number(self.answer)

    def __post_init__(self) -> None:
        if self.expected is None:
            raise ValueError("answer does not end with `#### NUMBER`")


class Sampled(msgspec.Struct, frozen=True, rename={"question": "prompt", "answer": "upstream_answer"}):
    """A line of a sample that names its questions."""

    id: str
    question: str
    answer: str
    expected: str

    def name(self, index: int) -> str:
        return self.id


class Gsm8k:
    name = "gsm8k"
    file = "the test split of GSM8K as JSON lines with the keys question and answer"
    kinds: Sequence[type[Any]] = (Upstream, Sampled)
    shots = 5
    flags: Mapping[str, str] = {
        "strict": "share of right answers in the form that was asked for: boxed (chat) or after #### (base)",
    }

    def ready(self, config: Config) -> None:
        pass

    def prompt(self, item: Any, shots: Sequence[Any], style: Style) -> Prompt:
        if style == "chat":
            return Prompt(f"{item.question}\n{BOXED}")
        solved = [f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots]
        return Prompt("".join(solved) + f"Question: {item.question}\nAnswer:", ("Question:",))

    def grade(self, config: Config, item: Any, text: str) -> dict[str, Any]:
        """Right is the last number; in chat style the last number of the last box, where there is one."""
        expected = plain_number(item.expected)
        if config.prompt.style == "chat":
            boxed = last_boxed(text)
            strict = None if boxed is None else plain_number(boxed)
            answer = last_number(text if boxed is None else boxed)
        else:
            strict, answer = marked_number(text), last_number(text)
        return {"correct": answer == expected, "strict": strict == expected, "answer": answer, "expected": expected}


_evaluation = generation.Evaluation(Gsm8k())
METRICS = _evaluation.METRICS
inputs, units, measure = _evaluation.inputs, _evaluation.units, _evaluation.measure
conclude, draw = _evaluation.conclude, _evaluation.draw
