"""MBPP: write a short Python function from a sentence, tested by assertions (arXiv 2108.07732)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kdjax.evaluate.benchmarks import coding, generation
from kdjax.evaluate.benchmarks.code import last_block
from kdjax.evaluate.benchmarks.coding import Config as Config
from kdjax.evaluate.benchmarks.task import Prompt, Style

CLAIM = "MBPP: share of functions that pass their assertions (pass@1, pass@k)"

SHOWN = 3
"""Assertions in a prompt."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the full file, whose sentence is called `text`."""

    task_id: int | str
    text: str
    test_list: list[str]
    code: str = ""
    test_setup_code: str = ""

    def name(self, index: int) -> str:
        return f"mbpp/{self.task_id}"

    @property
    def setup(self) -> str:
        return self.test_setup_code


class Sanitized(msgspec.Struct, frozen=True, kw_only=True, rename={"text": "prompt"}):
    """A line of the sanitized file, whose sentence is called `prompt`."""

    task_id: int | str
    text: str
    test_list: list[str]
    code: str = ""
    test_imports: list[str] = []

    def name(self, index: int) -> str:
        return f"mbpp/{self.task_id}"

    @property
    def setup(self) -> str:
        return "\n".join(self.test_imports)


class Mbpp:
    name = "mbpp"
    file = "MBPP as JSON lines with the keys task_id, text (or prompt) and test_list"
    kinds: Sequence[type[Any]] = (Problem, Sanitized)
    shots = 3
    flags: Mapping[str, str] = {}

    def ready(self, config: Config) -> None:
        coding.ready(config)

    def prompt(self, item: Any, shots: Sequence[Any], style: Style) -> Prompt:
        if style == "chat":
            return Prompt(item.text)
        solved = [f"{_task(shot)}{shot.code}\n[DONE]\n\n" for shot in shots]
        return Prompt("".join(solved) + _task(item), ("[DONE]",))

    def grade(self, config: Config, item: Any, text: str) -> dict[str, Any]:
        block = last_block(text, "def ")
        code = text if block is None else block
        return coding.grade(config, [code, "\n".join([item.setup, *item.test_list])])


def _task(item: Any) -> str:
    tests = "\n".join(item.test_list[:SHOWN])
    return (
        f"You are an expert Python programmer, and here is your task: {item.text} "
        f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
    )


_evaluation = generation.Evaluation(Mbpp())
METRICS = _evaluation.METRICS
inputs, units, measure = _evaluation.inputs, _evaluation.units, _evaluation.measure
conclude, draw = _evaluation.conclude, _evaluation.draw
