"""What the cells of a sweep measured, in one file that survives a kill at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from kdjax.output import writing

Record = dict[str, Any]


class Ledger:
    """`metrics.jsonl`: the records of one cell after another, each with its `cell`, then a line with their number.

    A cell without that last line was cut short, and its records are `unfinished`: the caller goes on from them or
    drops them. A line that a kill has torn does not count. So no record is lost and none is there twice. Reading
    changes nothing; `arrange` has to come before the first line is added to a file that was cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[str, list[Record]] = {}
        """Records of the finished cells."""
        self.unfinished: dict[str, list[Record]] = {}
        """Records of the cells that were cut short or failed."""
        self.failures: dict[str, str] = {}
        """Why cells failed; a later start tries them again."""
        self._read()

    def append(self, cell: str, record: Record) -> None:
        """One record of a cell that is not finished; it is on disk when this returns."""
        [kept] = self._append([{"cell": cell, **record}])
        self.unfinished.setdefault(cell, []).append(_bare(kept))

    def finish(self, cell: str) -> None:
        """Closes the cell of which the `unfinished` records are there."""
        self._append([{"cell": cell, "records": len(self.unfinished.get(cell, []))}])
        self._close(cell, self.unfinished.get(cell, []))

    def add(self, cell: str, records: Sequence[Record]) -> None:
        """A whole cell at once."""
        *kept, _ = self._append([*_lines(cell, records), {"cell": cell, "records": len(records)}])
        self._close(cell, [_bare(line) for line in kept])

    def fail(self, cell: str, error: str) -> None:
        """A cell that raised; on disk when this returns."""
        self._append([{"cell": cell, "error": error}])
        self.failures[cell] = error

    def arrange(self, order: Iterable[str]) -> None:
        """Rewrites the file with the cells in `order`, each as it is in memory, and without what was superseded."""
        lines: list[Record] = []
        for cell in order:
            if cell in self.cells:
                records = self.cells[cell]
                lines += [*_lines(cell, records), {"cell": cell, "records": len(records)}]
                continue
            lines += _lines(cell, self.unfinished.get(cell, []))
            if cell in self.failures:
                lines.append({"cell": cell, "error": self.failures[cell]})
        part = self.path.with_suffix(".part")
        with writing(self.path):
            with part.open("w", encoding="utf-8") as file:
                _write(file, lines)
            part.replace(self.path)

    def _close(self, cell: str, records: list[Record]) -> None:
        self.cells[cell] = records
        self.unfinished.pop(cell, None)
        self.failures.pop(cell, None)

    def _append(self, lines: list[Record]) -> list[Record]:
        """The lines as a later start reads them: what a run concludes does not depend on where it was cut."""
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            return _write(file, lines)

    def _read(self) -> None:
        if not self.path.exists():
            return
        for text in self.path.read_bytes().split(b"\n"):  # not splitlines: texts may hold other line separators
            try:
                line = json.loads(text)
            except ValueError:  # torn by a kill
                continue
            cell = line["cell"]
            if line.keys() == {"cell", "error"}:  # a record may have an error of its own among its figures
                self.failures[cell] = line["error"]
            elif line.keys() == {"cell", "records"}:
                if len(records := self.unfinished.get(cell, [])) == line["records"]:
                    self._close(cell, records)
            else:
                self.unfinished.setdefault(cell, []).append(_bare(line))


def _lines(cell: str, records: Iterable[Record]) -> list[Record]:
    return [{"cell": cell, **record} for record in records]


def _bare(line: Record) -> Record:
    return {key: value for key, value in line.items() if key != "cell"}


def _write(file: TextIO, lines: Iterable[Record]) -> list[Record]:
    texts = [json.dumps(line, ensure_ascii=False) for line in lines]
    file.write("".join(f"{text}\n" for text in texts))
    file.flush()
    os.fsync(file.fileno())
    return [json.loads(text) for text in texts]
