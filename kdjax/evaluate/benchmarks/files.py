"""Benchmark files: JSON lines, each checked against the keys that a task needs."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kdjax.errors import KdjaxError

Item = TypeVar("Item")


def read_items(path: Path, kinds: Sequence[type[Item]], key: str = "path") -> list[Item]:
    """The lines of a `.jsonl` or `.jsonl.gz` file, each as the first of `kinds` whose keys it has.

    Keys that no kind names are ignored. Raises KdjaxError naming file, line and key for the first line that does not
    fit, and for a file that is missing (`key` is the setting to correct), empty or not JSON lines.
    """
    items = []
    for number, line in enumerate(_lines(path, key), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise KdjaxError(f"{where}: {error}: write one JSON object a line") from error
        if not isinstance(value, dict):
            raise KdjaxError(f"{where}: {type(value).__name__} instead of an object: write one JSON object a line")
        items.append(_convert(value, kinds, where))
    if not items:
        raise KdjaxError(f"{path}: the file is empty: give one JSON object a line")
    return items


def _lines(path: Path, key: str) -> list[bytes]:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).split(b"\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise KdjaxError(f"{path}: not a gzip file ({error}): write it again or drop the .gz of its name") from error
    except OSError as error:
        raise KdjaxError(f"{key} = {str(path)!r}: cannot read it ({error.strerror}): give another file") from error


def _convert(value: dict[str, Any], kinds: Sequence[type[Item]], where: str) -> Item:
    missing = {kind: [name for name in _required(kind) if name not in value] for kind in kinds}
    kind = min(kinds, key=lambda kind: len(missing[kind]))
    if missing[kind]:
        shapes = " or ".join(", ".join(_required(kind)) for kind in kinds)
        raise KdjaxError(f"{where}: no key {missing[kind][0]!r}: each line needs {shapes}")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise KdjaxError(f"{where}: {str(error).replace('`$.', '`')}") from error


def _required(kind: type[Any]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind) if field.required]
