"""What a benchmark that is answered in words provides; `generation` does the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from kdjax.evaluate.benchmarks.questions import Asking

Style = Literal["chat", "base"]

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
"""Follows the question on a line of its own; the prompt of the DFlash and DDTree evaluations."""


class Prompt(NamedTuple):
    """`text` is the one user turn in chat style, and what is continued in base style."""

    text: str
    stops: tuple[str, ...] = ()


@runtime_checkable
class Task(Asking, Protocol):
    """One benchmark. `shots` are for base style.

    Attributes:
        flags: what `grade` says of an answer besides `correct`, each true or false, with its definition.
    """

    flags: Mapping[str, str]

    def prompt(self, item: Any, shots: Sequence[Any], style: Style) -> Prompt: ...

    def ready(self, config: Any) -> None:
        """Raises KdjaxError where answers could not be graded; asked before anything is generated."""
        ...

    def grade(self, config: Any, item: Any, text: str) -> dict[str, Any]:
        """What is recorded of an answer without its thinking: `correct`, the `flags`, and more for a reader."""
        ...
