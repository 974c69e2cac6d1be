from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from kdjax.config import dumps
from kdjax.errors import KdjaxError
from kdjax.output import write_text, writing
from kdjax.run.ledger import Ledger


class RunFolder:
    """`config.toml` (resolved), `provenance.json`, `metrics.jsonl` (one object a line), `summary.json` (written last).

    A folder without `summary.json` belongs to a run that did not finish.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: msgspec.Struct) -> RunFolder:
        """Makes the folder and saves the config. Raises KdjaxError where it holds a run already or cannot be made."""
        cls.reserve(path)
        write_text(path / "config.toml", dumps(config))
        return cls(path)

    @staticmethod
    def reserve(path: Path) -> None:
        """Makes the folder, which is worth it before an expensive start. Raises like `create`."""
        if (path / "config.toml").exists():
            raise KdjaxError(f"{path} already holds a run: give another folder or remove this one")
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)

    @classmethod
    def open(cls, path: Path, config: str) -> RunFolder:
        """The folder of a run that continues where it was cut short, or a new one. `config` is TOML.

        What was refused or failed before it measured anything leaves its folder to the corrected settings.

        Raises KdjaxError where the folder holds results of another config, or cannot be made.
        """
        file = path / "config.toml"
        folder = cls(path)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                write_text(file, config)
            elif file.read_text(encoding="utf-8") != config:
                if folder._has_results():
                    raise KdjaxError(
                        f"{file} is of a run with other settings: give another --out, the same settings, or remove it"
                    )
                for name in ("metrics.jsonl", "provenance.json", "summary.json"):
                    (path / name).unlink(missing_ok=True)
                write_text(file, config)
        return folder

    def _has_results(self) -> bool:
        if not (self.path / "metrics.jsonl").exists():
            return (self.path / "summary.json").exists()
        ledger = Ledger(self.path / "metrics.jsonl")
        return bool(ledger.cells or ledger.unfinished)

    def read(self, name: str) -> dict[str, Any] | None:
        """The JSON file of that name; None where it is missing."""
        file = self.path / name
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def write(self, name: str, value: dict[str, Any]) -> None:
        """A JSON file of that name, whole or not at all: a run may be killed while it writes."""
        write_text(self.path / name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def log(self, value: dict[str, Any]) -> None:
        """Appends one line to `metrics.jsonl`."""
        metrics = self.path / "metrics.jsonl"
        with writing(metrics), metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
