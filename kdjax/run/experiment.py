"""What an experiment provides, and what it gets back to conclude from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from kdjax.run.ledger import Record
from kdjax.run.statistics import Estimate, Metric, estimate


class Inputs(NamedTuple):
    """What a cell reads and runs on, for the provenance: folders and files by role."""

    checkpoints: Mapping[str, Path] = {}
    files: Mapping[str, Path] = {}
    backend: str = "xla"


class Result(NamedTuple):
    """A finished cell."""

    name: str
    config: Any
    records: Sequence[Record]
    estimates: Mapping[str, Estimate]

    def value(self, metric: str) -> float:
        return self.estimates[metric].value


@runtime_checkable
class Experiment(Protocol):
    """A module that `kdjax run` runs.

    `CLAIM` says which figure or claim it reproduces in kind. `measure` yields the records of one cell; a record names
    its `unit` (a prompt, a repetition), and keeps under `timings` all that differs from run to run. `conclude` says in
    words what was found; `draw` fills a matplotlib figure. Both see the cells that did not fail, at least one.
    """

    CLAIM: str
    Config: type[msgspec.Struct]
    METRICS: Mapping[str, Metric]

    def inputs(self, config: Any) -> Inputs: ...

    def measure(self, config: Any) -> Iterator[Record]: ...

    def conclude(self, results: Sequence[Result]) -> list[str]: ...

    def draw(self, results: Sequence[Result], figure: Any) -> None: ...


def result(name: str, config: Any, records: Sequence[Record], metrics: Mapping[str, Metric]) -> Result:
    found = {key: estimate(metric, records) for key, metric in metrics.items()}
    return Result(name, config, records, {key: value for key, value in found.items() if value is not None})
