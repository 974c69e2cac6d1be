"""Runs the cells of a sweep one after another, keeps what each measured, and sums up."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from kdjax.config.sweep import Sweep
from kdjax.errors import KdjaxError
from kdjax.run.experiment import Experiment, Result, result
from kdjax.run.folder import RunFolder
from kdjax.run.ledger import Ledger
from kdjax.run.plot import new_figure, save
from kdjax.run.provenance import differences, provenance


class Step(NamedTuple):
    """A cell begins (`records` None), or has ended with that many records, none where it failed."""

    cell: str
    records: int | None


class Run:
    """A sweep in its folder: `config.toml`, `provenance.json`, `metrics.jsonl`, `summary.json`, `plot.png`.

    Cells that the folder has already are not measured again. Raises KdjaxError where it belongs to other settings.
    """

    def __init__(self, experiment: Experiment, sweep: Sweep, path: Path) -> None:
        self._experiment, self._sweep = experiment, sweep
        self.folder = RunFolder.open(path, tomli_w.dumps(sweep.document))
        self._ledger = Ledger(path / "metrics.jsonl")
        self.pending = [cell for cell in sweep.cells if cell.name not in self._ledger.cells]

    @property
    def failures(self) -> dict[str, str]:
        return self._ledger.failures

    def steps(self) -> Iterator[Step]:
        """Measures the pending cells. A cell that raises is recorded and does not keep the others from running.

        Raises KdjaxError where the folder's cells were measured with other code, weights, prompts or devices.
        """
        if self.pending:
            self._prove()
            self._arrange()
        for cell in self.pending:
            yield Step(cell.name, None)
            try:
                records = list(self._experiment.measure(cell.config))
            except Exception as error:
                with (self.folder.path / "errors.log").open("a", encoding="utf-8") as log:
                    log.write(f"cell {cell.name}\n{traceback.format_exc()}\n")
                self._ledger.fail(cell.name, " ".join(f"{type(error).__name__}: {error}".split()))
                yield Step(cell.name, 0)
            else:
                self._ledger.add(cell.name, records)
                yield Step(cell.name, len(records))
        self._arrange()

    def results(self) -> list[Result]:
        """The cells that did not fail, in order."""
        metrics, done = self._experiment.METRICS, self._ledger.cells
        return [result(c.name, c.config, done[c.name], metrics) for c in self._sweep.cells if c.name in done]

    def summarise(self, *, plot: bool) -> dict[str, Any]:
        """Writes `summary.json`, and with `plot` also `plot.png`, of the cells that did not fail."""
        experiment, results = self._experiment, self.results()
        try:
            findings = experiment.conclude(results) if results else []
            if results and plot:
                figure = new_figure()
                experiment.draw(results, figure)
                save(figure, self.folder.path / "plot.png")
        except Exception as error:
            if not self.failures:
                raise
            findings = [f"nothing is concluded without the cells that failed ({type(error).__name__}: {error})"]
        metrics = experiment.METRICS
        summary = {
            "experiment": self._sweep.experiment,
            "claim": experiment.CLAIM,
            "metrics": {
                name: {"total": m.total, "per": m.per, "definition": m.definition} for name, m in metrics.items()
            },
            "cells": {r.name: {name: e._asdict() for name, e in r.estimates.items()} for r in results},
            "failed": self.failures,
            "findings": findings,
        }
        self.folder.write("summary.json", summary)
        return summary

    def _arrange(self) -> None:
        self._ledger.arrange(cell.name for cell in self._sweep.cells)

    def _prove(self) -> None:
        inputs = [self._experiment.inputs(cell.config) for cell in self._sweep.cells]
        now = provenance(
            _together([one.checkpoints for one in inputs]),
            "+".join(sorted({one.backend for one in inputs})),
            _together([one.files for one in inputs]),
        )
        before = self.folder.read("provenance.json")
        if before is None:
            self.folder.write("provenance.json", now)
        elif self._ledger.cells and (found := differences(before, now)):
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
