"""Two runs of one experiment, cell by cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from kdjax.config.strict import Document, closest
from kdjax.config.sweep import leaves
from kdjax.errors import KdjaxError
from kdjax.run.folder import RunFolder
from kdjax.run.ledger import Ledger, Record
from kdjax.run.provenance import differences
from kdjax.run.statistics import Difference, Metric, difference


class Finished(NamedTuple):
    """What a run left in its folder."""

    path: Path
    config: dict[str, Any]
    metrics: dict[str, Metric]
    cells: dict[str, list[Record]]
    provenance: dict[str, Any]


class Comparison(NamedTuple):
    """`rows`: (cell of A, cell of B, metric, difference). `changed`: provenance that differs between the runs.

    `settings`: dotted keys of the configs that differ, with the values of A and B, be they set or chosen by the device;
    None where a run has none.
    """

    settings: dict[str, tuple[Any, Any]]
    rows: list[tuple[str, str, str, Difference]]
    only_a: list[str]
    only_b: list[str]
    changed: list[str]


def read_finished(path: Path) -> Finished:
    """Raises KdjaxError where there is no run with a summary."""
    folder = RunFolder(path)
    summary = folder.read("summary.json")
    if not summary or "metrics" not in summary:
        raise KdjaxError(f"{path} holds no finished run of kdjax run: give the folder that its --out named")
    metrics = {name: Metric(**fields) for name, fields in summary["metrics"].items()}
    config = Document.read(path / "config.toml", lambda _: False).data
    return Finished(path, config, metrics, Ledger(path / "metrics.jsonl").cells, folder.read("provenance.json") or {})


def compare(a: Finished, b: Finished, cells: tuple[str, str] | None = None) -> Comparison:
    """B less A in every metric that both have, in cells of the same name or in the two that `cells` names.

    Raises KdjaxError where nothing is common.
    """
    if cells:
        for finished, cell in zip((a, b), cells, strict=True):
            if cell not in finished.cells:
                raise KdjaxError(f"{finished.path} has no cell {cell!r}: {closest(cell, finished.cells)}")
        pairs = [cells]
    else:
        pairs = [(cell, cell) for cell in a.cells if cell in b.cells]
    metrics = [name for name in a.metrics if a.metrics[name] == b.metrics.get(name)]
    if not pairs or not metrics:
        raise KdjaxError(
            f"{a.path} and {b.path} have no {'metric' if pairs else 'cell'} in common: name two cells by --cells, or "
            "compare runs of the same experiment"
        )
    rows = []
    for one, other in pairs:
        for name in metrics:
            found = difference(a.metrics[name], a.cells[one], b.cells[other])
            if found:
                rows.append((one, other, name, found))
    left, right = (
        ([], []) if cells else ([c for c in a.cells if c not in b.cells], [c for c in b.cells if c not in a.cells])
    )
    return Comparison(_settings(a, b), rows, left, right, differences(a.provenance, b.provenance))


def _settings(a: Finished, b: Finished) -> dict[str, tuple[Any, Any]]:
    """With what the device chose where a config is silent, if both runs kept that."""
    both = "settled" in a.provenance and "settled" in b.provenance
    one, other = (
        (run.provenance["settled"] if both else {}) | {".".join(key): value for key, value in leaves(run.config)}
        for run in (a, b)
    )
    return {key: (one.get(key), other.get(key)) for key in one | other if one.get(key) != other.get(key)}
