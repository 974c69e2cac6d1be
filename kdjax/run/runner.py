"""Runs the cells of a sweep one after another, keeps what each measured, and sums up."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kdjax.config.sweep import Cell, Sweep
from kdjax.errors import KdjaxError
from kdjax.output import NotWritten, writing
from kdjax.run import settled
from kdjax.run.experiment import Evaluation, Experiment, Result, result
from kdjax.run.folder import RunFolder
from kdjax.run.ledger import Ledger
from kdjax.run.plot import new_figure, save
from kdjax.run.provenance import differences, provenance


class Step(NamedTuple):
    """A cell begins, has got one more of its units, or has `ended`; `of` is 0 where it is not measured by units."""

    cell: str
    ended: bool = False
    units: int = 0
    of: int = 0


class Run:
    """A sweep in its folder: `config.toml`, `provenance.json`, `metrics.jsonl`, `summary.json`, `plot.png`.

    What the folder has already is not measured again: whole cells of an experiment, units of an evaluation.

    Raises KdjaxError where the folder belongs to other settings.
    """

    def __init__(self, study: Experiment | Evaluation, sweep: Sweep, path: Path) -> None:
        self._study, self._sweep = study, sweep
        try:
            self.folder = RunFolder.open(path, sweep.toml)
        except KdjaxError:
            for cell in sweep.cells:
                study.inputs(cell.config)  # what cannot run in another folder either is said first
            raise
        self._ledger = Ledger(path / "metrics.jsonl")
        if not isinstance(study, Evaluation):
            self._ledger.unfinished.clear()
        self.pending = [cell for cell in sweep.cells if cell.name not in self._ledger.cells]

    @property
    def failures(self) -> dict[str, str]:
        """Why cells failed, by name."""
        return self._ledger.failures

    @property
    def refusal(self) -> str | None:
        """The message of the KdjaxError that no cell got past: bad input, not a cell that failed."""
        kind, _, message = next(iter(self.failures.values()), "").partition(": ")
        alike = not self._ledger.cells and len(set(self.failures.values())) == 1
        return message if alike and kind == KdjaxError.__name__ else None

    def steps(self) -> Iterator[Step]:
        """Measures the pending cells. A cell that raises is recorded and does not keep the others from running.

        Raises KdjaxError where the folder's cells were measured with other code, weights, prompts or devices, and where
        nothing more can be written.
        """
        if self.pending:
            self._prove()
            self._arrange()
        for cell in self.pending:
            yield Step(cell.name)
            try:
                yield from self._measure(cell)
            except NotWritten:
                raise
            except Exception as error:
                errors = self.folder.path / "errors.log"
                with writing(errors), errors.open("a", encoding="utf-8") as log:
                    log.write(f"cell {cell.name}\n{traceback.format_exc()}\n")
                self._ledger.fail(cell.name, " ".join(f"{type(error).__name__}: {error}".split()))
            yield Step(cell.name, ended=True)
        self._arrange()

    def _measure(self, cell: Cell) -> Iterator[Step]:
        if isinstance(self._study, Evaluation):
            yield from self._measure_units(self._study, cell)
        else:
            self._ledger.add(cell.name, list(self._study.measure(cell.config)))

    def _measure_units(self, study: Evaluation, cell: Cell) -> Iterator[Step]:
        """The units that the ledger lacks, each on disk before the next begins."""
        place = {unit: i for i, unit in enumerate(study.units(cell.config))}
        records = self._ledger.unfinished.setdefault(cell.name, [])
        missing = place.keys() - {record["unit"] for record in records}
        yield Step(cell.name, units=len(records), of=len(place))
        if missing:
            for record in study.measure(cell.config, [unit for unit in place if unit in missing]):
                if record["unit"] not in missing:
                    raise RuntimeError(f"unit {record['unit']!r} came twice, or was not asked for")
                missing.remove(record["unit"])
                self._ledger.append(cell.name, record)
                yield Step(cell.name, units=len(records), of=len(place))
        if missing:
            raise RuntimeError(f"{len(missing)} units have no record, {min(missing)!r} among them")
        records.sort(key=lambda record: place[record["unit"]])
        self._arrange()  # before the cell counts as finished: figures depend on the order of the units
        self._ledger.finish(cell.name)

    def results(self) -> list[Result]:
        """The cells that did not fail, in order."""
        metrics, done = self._study.METRICS, self._ledger.cells
        return [result(c.name, c.config, done[c.name], metrics) for c in self._sweep.cells if c.name in done]

    def summarise(self, *, plot: bool) -> dict[str, Any]:
        """Writes `summary.json`, and with `plot` also `plot.png`, of the cells that did not fail."""
        study, results = self._study, self.results()
        try:
            findings = study.conclude(results) if results else []
            if results and plot:
                figure = new_figure()
                study.draw(results, figure)
                save(figure, self.folder.path / "plot.png")
        except Exception as error:
            if not self.failures or isinstance(error, NotWritten):
                raise
            findings = [f"nothing is concluded without the cells that failed ({type(error).__name__}: {error})"]
        key = next(iter(self._sweep.document))
        summary = {
            key: self._sweep.name,
            "claim": study.CLAIM,
            "metrics": {name: msgspec.to_builtins(metric) for name, metric in study.METRICS.items()},
            "cells": {r.name: {name: e._asdict() for name, e in r.estimates.items()} for r in results},
            "failed": self.failures,
            "findings": findings,
        }
        self.folder.write("summary.json", summary)
        return summary

    def _arrange(self) -> None:
        self._ledger.arrange(cell.name for cell in self._sweep.cells)

    def _prove(self) -> None:
        inputs = [self._study.inputs(cell.config) for cell in self._sweep.cells]
        now = provenance(
            _together([one.checkpoints for one in inputs]),
            "+".join(sorted({one.backend for one in inputs})),
            _together([one.files for one in inputs]),
        )
        now["settled"] = settled.settings(cell.config for cell in self._sweep.cells)
        before = self.folder.read("provenance.json")
        if before is None or not (self._ledger.cells or self._ledger.unfinished):
            self.folder.write("provenance.json", now)
        elif found := differences(before, now):
            raise KdjaxError(
                f"{self.folder.path} was measured with another {', '.join(found)}: give another --out, or go back"
            )
        else:
            self.folder.write("provenance.json", {**before, "resumed": [*before.get("resumed", []), _now()]})


def _together(many: list[Any]) -> dict[str, Path]:
    """One entry per path; a role that stands for several paths is numbered from its second on."""
    found: dict[str, Path] = {}
    for role, path in ((role, path) for one in many for role, path in one.items()):
        if path in found.values():
            continue
        number = sum(key.split("#")[0] == role for key in found)
        found[f"{role}#{number + 1}" if number else role] = path
    return found


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
