"""Which lines of a benchmark's file are asked, and which are shown solved before them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from kdjax.config.decode import AtLeast0, AtLeast1
from kdjax.errors import KdjaxError
from kdjax.evaluate.benchmarks.files import read_items


class ShotsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`shots` solved examples come before each question, the first that fit of `shots_path`.

    Absent, there are as many as the benchmark's convention has.
    """

    shots: AtLeast0 | None = None
    shots_path: str | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` questions of the file `path` after the first `skip`, all without it."""

    path: str = ""
    skip: AtLeast0 = 0
    count: AtLeast1 | None = None


class Item(Protocol):
    """A line of the file, as a msgspec.Struct."""

    def name(self, index: int) -> str:
        """The unit of the records; `index` counts the lines of the file from 0."""
        ...


@runtime_checkable
class Asking(Protocol):
    """What a benchmark says of its file.

    Attributes:
        name: as in `evaluation = NAME`.
        file: what to give as `path`, in words.
        kinds: the shapes of a line, see `read_items`.
        shots: solved examples before a question, by convention.
    """

    name: str
    file: str
    kinds: Sequence[type[Any]]
    shots: int


def asked(task: Asking, config: Config) -> dict[str, tuple[int, Any]]:
    """Index and item of each question, by its name.

    Raises KdjaxError where the file is not given or unusable, has too few questions or one twice.
    """
    if not config.path:
        raise KdjaxError(f"path is not set: {task.name} needs {task.file}: --set path=FILE")
    items = list(enumerate(read_items(Path(config.path), task.kinds)))
    chosen = items[config.skip :][: config.count]
    if not chosen or (config.count and len(chosen) < config.count):
        raise KdjaxError(
            f"{config.path} has {len(items)} questions, skip = {config.skip} and count = {config.count}: lower them"
        )
    found: dict[str, tuple[int, Any]] = {}
    for index, item in chosen:
        name = item.name(index)
        if name in found:
            raise KdjaxError(f"{config.path}: the question {name!r} is there twice: drop one")
        found[name] = index, item
    return found


def shots_file(task: Asking, section: ShotsSection, shots: int) -> Path | None:
    """Where the solved examples are; None where none are wanted. Raises KdjaxError where the file is not given."""
    if not shots:
        return None
    if section.shots_path is None:
        raise KdjaxError(
            f"prompt.shots_path is not set: {task.name} shows {shots} solved examples before each question: give a "
            "file of its training split, or prompt.shots = 0"
        )
    return Path(section.shots_path)


def solved(task: Asking, section: ShotsSection, shots: int) -> list[Any]:
    """All examples of the file; none where none are wanted."""
    file = shots_file(task, section, shots)
    return [] if file is None else read_items(file, task.kinds, "prompt.shots_path")


def not_among(shown: Sequence[Any], name: str, item: Any) -> None:
    """Raises KdjaxError where a question is one of the examples that are shown solved before it."""
    if item in shown:
        raise KdjaxError(f"question {name!r} is shown solved before itself: skip it or give another prompt.shots_path")
