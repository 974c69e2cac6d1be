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
        """The figure without its interval. Raises KeyError where no record has it."""
        return self.estimates[metric].value


class Study(Protocol):
    """What a module that is run over a sweep provides, whichever way it measures.

    `CLAIM` says what it shows: for an experiment, the figure or claim that it reproduces in kind. A record names its
    `unit` (a prompt, a repetition), and keeps under `timings` all that differs from run to run. `conclude` says in
    words what was found; `draw` fills a matplotlib figure. Both see the cells that did not fail, at least one.
    """

    CLAIM: str
    Config: type[msgspec.Struct]
    METRICS: Mapping[str, Metric]

    def inputs(self, config: Any) -> Inputs:
        """What the cell of this config reads, for the provenance."""
        ...

    def conclude(self, results: Sequence[Result]) -> list[str]:
        """Findings, one sentence or two each."""
        ...

    def draw(self, results: Sequence[Result], figure: Any) -> None:
        """Fills an empty matplotlib figure."""
        ...


@runtime_checkable
class Experiment(Study, Protocol):
    """Measures a cell as a whole; one that was cut short is measured again. Its units may have several records."""

    def measure(self, config: Any) -> Iterator[Record]:
        """The records of one cell."""
        ...


@runtime_checkable
class Evaluation(Study, Protocol):
    """Measures a cell unit by unit; one that was cut short goes on with the units that are missing.

    `units` names all units of a cell, in the order in which their records are kept. `measure` gets some of these names
    and yields exactly one record for each, in any order. A record must not depend on which other units are asked for.
    """

    def units(self, config: Any) -> Sequence[str]:
        """Names of all units of a cell."""
        ...

    def measure(self, config: Any, units: Sequence[str]) -> Iterator[Record]:
        """One record for each of these units."""
        ...


def result(name: str, config: Any, records: Sequence[Record], metrics: Mapping[str, Metric]) -> Result:
    """A cell with the estimates of those metrics that its records have."""
    found = {key: estimate(metric, records) for key, metric in metrics.items()}
    return Result(name, config, records, {key: value for key, value in found.items() if value is not None})
