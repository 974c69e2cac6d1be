from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from kdjax.config import dumps
from kdjax.errors import KdjaxError


class RunFolder:
    """`config.toml` (resolved), `provenance.json`, `metrics.jsonl` (one object a line), `summary.json` (written last).

    A folder without `summary.json` belongs to a run that did not finish.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: msgspec.Struct) -> RunFolder:
        """Makes the folder and saves the config. Raises KdjaxError where it holds a run already or cannot be made."""
        cls.refuse_used(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.toml").write_text(dumps(config), encoding="utf-8")
        except OSError as error:
            raise KdjaxError(f"{path}: cannot write the run folder ({error.strerror}): give another one") from error
        return cls(path)

    @staticmethod
    def refuse_used(path: Path) -> None:
        """Raises KdjaxError where the folder holds a run; worth asking before an expensive start."""
        if (path / "config.toml").exists():
            raise KdjaxError(f"{path} already holds a run: give another folder or remove this one")

    def write(self, name: str, value: dict[str, Any]) -> None:
        """A JSON file of that name, whole or not at all: a run may be killed while it writes."""
        part = self.path / f"{name}.part"
        part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        part.rename(self.path / name)

    def log(self, value: dict[str, Any]) -> None:
        """Appends one line to `metrics.jsonl`."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
