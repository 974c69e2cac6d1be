"""HellaSwag: the most likely ending of a description (arXiv 1905.07830)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from kdjax.evaluate.benchmarks import choices
from kdjax.evaluate.benchmarks.choices import Asked
from kdjax.evaluate.benchmarks.choices import Config as Config

CLAIM = "HellaSwag: share of descriptions whose right ending is the most likely one"


class Description(msgspec.Struct, frozen=True, rename={"right": "label"}):
    """A line of the published file. `ctx` is `ctx_a`, a space, and `ctx_b`: how the last sentence begins."""

    activity_label: str
    ctx: str
    endings: list[str]
    right: int
    ctx_a: str | None = None
    ctx_b: str | None = None

    def __post_init__(self) -> None:
        _check(self, "label")

    def name(self, index: int) -> str:
        return f"hellaswag/{index}"


class Sampled(msgspec.Struct, frozen=True, rename={"right": "expected_index"}):
    """A line of a sample that names its descriptions."""

    id: str
    activity_label: str
    ctx: str
    endings: list[str]
    right: int

    def __post_init__(self) -> None:
        _check(self, "expected_index")

    def name(self, index: int) -> str:
        return self.id


class HellaSwag:
    name = "hellaswag"
    file = "HellaSwag's validation split as JSON lines with the keys activity_label, ctx, endings and label"
    kinds: Sequence[type[Any]] = (Description, Sampled)
    shots = 0

    def shots_for(self, item: Any, examples: Sequence[Any]) -> list[Any]:
        return list(examples)

    def ask(self, item: Any, shots: Sequence[Any]) -> Asked:
        solved = [f"{_context(shot)} {_plain(shot.endings[shot.right])}\n\n" for shot in shots]
        return Asked("".join(solved) + _context(item), [f" {_plain(ending)}" for ending in item.endings], item.right)


def _check(item: Description | Sampled, key: str) -> None:
    if not 0 <= item.right < len(item.endings):
        raise ValueError(f"{key} = {item.right} is not the index of one of {len(item.endings)} endings")


def _context(item: Description | Sampled) -> str:
    """The last sentence gets a capital letter, as in lm-evaluation-harness, where the line says where it begins."""
    said = item.ctx
    if isinstance(item, Description) and item.ctx_a is not None and item.ctx_b is not None:
        said = f"{item.ctx_a} {item.ctx_b.capitalize()}"
    return _plain(f"{item.activity_label}: {said}")


def _plain(text: str) -> str:
    """Without the marks of the WikiHow source, as lm-evaluation-harness cleans them."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


_evaluation = choices.Evaluation(HellaSwag())
METRICS = choices.ACCURACY | choices.NORMALISED
inputs, units, measure = _evaluation.inputs, _evaluation.units, _evaluation.measure
conclude, draw = _evaluation.conclude, _evaluation.draw
