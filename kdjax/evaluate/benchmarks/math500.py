r"""MATH-500: competition mathematics (arXiv 2103.03874, the 500 of arXiv 2305.20050), answered in a box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from kdjax.evaluate.benchmarks import generation, latex
from kdjax.evaluate.benchmarks.answers import last_boxed, last_number
from kdjax.evaluate.benchmarks.task import BOXED, Prompt, Style

CLAIM = "MATH-500: share of competition problems whose boxed answer is equivalent to the expected one"


class Config(generation.Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`verifier` "auto" asks math-verify, where it is installed, about answers whose normal forms differ."""

    verifier: Literal["auto", "math-verify", "none"] = "auto"


class Problem(msgspec.Struct, frozen=True):
    """A line of the published file."""

    problem: str
    solution: str
    answer: str
    unique_id: str | None = None
    subject: str | None = None
    level: int | None = None

    def name(self, index: int) -> str:
        return self.unique_id or f"math500/{index}"


class Math500:
    name = "math500"
    file = "MATH-500 as JSON lines with the keys problem, solution and answer"
    kinds: Sequence[type[Any]] = (Problem,)
    shots = 4
    flags: Mapping[str, str] = {"strict": "share of right answers that were boxed"}

    def ready(self, config: Config) -> None:
        latex.verifier(config.verifier)

    def prompt(self, item: Any, shots: Sequence[Any], style: Style) -> Prompt:
        if style == "chat":
            return Prompt(f"{item.problem}\n{BOXED}")
        solved = [f"Problem:\n{shot.problem}\n\nSolution: {shot.solution}\n\n" for shot in shots]
        return Prompt("".join(solved) + f"Problem:\n{item.problem}\n\nSolution:", ("Problem:",))

    def grade(self, config: Config, item: Any, text: str) -> dict[str, Any]:
        """The last box counts, without any the last number."""
        boxed = last_boxed(text)
        answer = last_number(text) if boxed is None else boxed
        by, correct = "normal form", answer is not None and latex.normal_form(answer) == latex.normal_form(item.answer)
        if answer is not None and not correct and (verifier := latex.verifier(config.verifier)):
            by, correct = verifier, latex.is_equivalent(answer, item.answer)
        return {
            "correct": correct,
            "strict": correct and boxed is not None,
            "answer": answer,
            "expected": item.answer,
            "graded_by": by,
            "subject": item.subject,
            "level": item.level,
        }


_evaluation = generation.Evaluation(Math500())
METRICS = _evaluation.METRICS
inputs, units, measure = _evaluation.inputs, _evaluation.units, _evaluation.measure
conclude, draw = _evaluation.conclude, _evaluation.draw
