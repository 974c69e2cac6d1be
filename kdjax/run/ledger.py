"""What the cells of a sweep measured, in one file that survives a kill at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Ledger:
    """`metrics.jsonl`: the records of one cell after another, each with its `cell`, then a line with their number.

    A cell without that last line was cut short: its lines do not count, and it is measured again. So no record is lost
    and none is there twice. Reading changes nothing; `arrange` has to come before the first `add` to a file that was
    cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[str, list[Record]] = {}
        """Records of the finished cells."""
        self.failures: dict[str, str] = {}
        """Why cells failed; a later start tries them again."""
        self._read()

    def add(self, cell: str, records: Sequence[Record]) -> None:
        self._append([*({"cell": cell, **record} for record in records), {"cell": cell, "records": len(records)}])
        self.cells[cell] = list(records)
        self.failures.pop(cell, None)

    def fail(self, cell: str, error: str) -> None:
        self._append([{"cell": cell, "error": error}])
        self.failures[cell] = error

    def arrange(self, order: Iterable[str]) -> None:
        """Rewrites the file with the cells in `order` and without what was cut short or superseded."""
        lines: list[Record] = []
        for cell in order:
            if cell in self.cells:
                records = self.cells[cell]
                lines += [*({"cell": cell, **record} for record in records), {"cell": cell, "records": len(records)}]
            elif cell in self.failures:
                lines.append({"cell": cell, "error": self.failures[cell]})
        part = self.path.with_suffix(".part")
        part.write_text("".join(_line(line) for line in lines), encoding="utf-8")
        part.replace(self.path)

    def _append(self, lines: list[Record]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(_line(line) for line in lines))
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> None:
        if not self.path.exists():
            return
        open_records: dict[str, list[Record]] = {}
        for text in self.path.read_bytes().split(b"\n"):  # not splitlines: texts may hold other line separators
            try:
                line = json.loads(text)
            except ValueError:  # torn by a kill
                continue
            cell = line.pop("cell")
            if "error" in line:
                open_records.pop(cell, None)
                self.failures[cell] = line["error"]
            elif line.keys() == {"records"}:
                records = open_records.pop(cell, [])
                if len(records) == line["records"]:
                    self.cells[cell] = records
                    self.failures.pop(cell, None)
            else:
                open_records.setdefault(cell, []).append(line)


def _line(value: Record) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
