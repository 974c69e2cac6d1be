"""HumanEval: complete a Python function so that its tests pass (arXiv 2107.03374)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kdjax.evaluate.benchmarks import coding, generation
from kdjax.evaluate.benchmarks.code import last_block
from kdjax.evaluate.benchmarks.coding import Config as Config
from kdjax.evaluate.benchmarks.task import Prompt, Style

CLAIM = "HumanEval: share of functions that pass their tests (pass@1, pass@k)"

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")


class Problem(msgspec.Struct, frozen=True):
    """A line of the published file. `test` defines `check(candidate)`."""

    task_id: str
    prompt: str
    entry_point: str
    test: str
    canonical_solution: str = ""

    def name(self, index: int) -> str:
        return self.task_id

    def parts(self, *program: str) -> list[str]:
        """What the sandbox runs: the program, then its tests."""
        return [*program, f"{self.test}\ncheck({self.entry_point})"]


class HumanEval:
    name = "humaneval"
    file = "HumanEval.jsonl.gz with the keys task_id, prompt, entry_point and test"
    kinds: Sequence[type[Any]] = (Problem,)
    shots = 0
    flags: Mapping[str, str] = {}

    def ready(self, config: Config) -> None:
        coding.ready(config)

    def prompt(self, item: Any, shots: Sequence[Any], style: Style) -> Prompt:
        if style == "base":
            return Prompt(
                "".join(shot.prompt + shot.canonical_solution + "\n\n" for shot in shots) + item.prompt, STOPS
            )
        asked = "Write a solution to the following problem and make sure that it passes the tests:"
        return Prompt(f"{asked}\n```python\n{item.prompt}\n```\n")

    def grade(self, config: Config, item: Any, text: str) -> dict[str, Any]:
        return coding.grade(config, item.parts(*program(config.prompt.style, item, text)))


def program(style: Style, item: Problem, text: str) -> list[str]:
    """The program in its parts: the prompt, which has imports and helpers, and a function that replaces its stub.

    What does not define the function completes the prompt.
    """
    if style == "base":
        return [item.prompt + text]
    function = f"def {item.entry_point}("
    block = last_block(text, function)
    code = text if block is None else block
    return [item.prompt, code] if function in code else [item.prompt + code]


_evaluation = generation.Evaluation(HumanEval())
METRICS = _evaluation.METRICS
inputs, units, measure = _evaluation.inputs, _evaluation.units, _evaluation.measure
conclude, draw = _evaluation.conclude, _evaluation.draw
