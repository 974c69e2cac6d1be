"""Files that are written whole or not at all, and what is said where they cannot be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kdjax.errors import KdjaxError


class NotWritten(KdjaxError):
    """A full disk, or a folder without permission: of no use to go on for what would be written next."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises NotWritten where what is written to `path` within cannot be."""
    try:
        yield
    except OSError as error:
        # that of a full disk does not name the file
        reason = error.strerror or error
        raise NotWritten(f"{path}: cannot be written ({reason}): make room or give another place") from error


def write_text(path: Path, text: str) -> None:
    """By way of `NAME.part`: a kill or a full disk leaves the file that was there, or none. Raises NotWritten."""
    part = path.with_name(f"{path.name}.part")
    with writing(path):
        part.write_text(text, encoding="utf-8")
        part.replace(path)
