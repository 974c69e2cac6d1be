"""The header of a safetensors file, checked before any of its data is read.

The format (huggingface/safetensors, "Format"): 8 bytes with the length of the header, little-endian; the header, one
JSON object from tensor name to dtype, shape and byte range; the data, without gaps and up to the end of the file.
"""

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
import stat
from typing import Any, NamedTuple

from kdjax.checkpoint.layout import DTYPES

# The limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000
# Beyond them a file is damaged, and products of sizes would take for ever to compute.
MAX_RANK, MAX_SIZE = 8, 2**63


class Entry(NamedTuple):
    """One tensor. `start` and `stop` are byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class BadHeader(Exception):
    """What is wrong with a file, as the end of a sentence that begins with its name."""


def shown(name: str, limit: int = 160) -> str:
    """A name out of a file in a message: one line, printable, not endless."""
    cut = name if len(name) <= limit else name[:limit] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for `json.loads(object_pairs_hook=)`, which would silently keep the last of equal keys.

    Raises:
        ValueError: a key is there twice.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        ((name, _),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(name)} is there twice")
    return made


def read_header(file: pathlib.Path) -> dict[str, Entry]:
    """Every tensor of `file`, in the order of its data.

    Raises:
        BadHeader: the file cannot be read, is no regular file, is truncated, or its header is not valid.
    """
    try:
        # A pipe or a device would block for ever.
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise BadHeader("is not a regular file")
        with file.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            head = source.read(8)
            length = header_length(head, size)
            return parse_header(source.read(length), size)
    except OSError as error:
        raise BadHeader(f"cannot be read ({error.strerror})") from None


def header_length(head: bytes, size: int) -> int:
    """Bytes of JSON that follow the first 8 bytes of a file of `size` bytes."""
    if size == 0:
        raise BadHeader("is empty (0 bytes)")
    if len(head) < 8:
        raise BadHeader(f"is truncated, {8 - len(head)} bytes of its header length are missing")
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER_BYTES:
        raise BadHeader(f"claims a header of {length} bytes, more than the {MAX_HEADER_BYTES} that safetensors allows")
    if 8 + length > size:
        raise BadHeader(f"is truncated, {8 + length - size} bytes are missing of a header of {length} bytes")
    return length


def _not_json(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _sizes(values: Any) -> bool:
    """A list of integers from 0; bool is a subclass of int, and true is not a size."""
    if not isinstance(values, list) or len(values) > MAX_RANK:
        return False
    for value in values:  # a generator would double the time that K2.6's 208,550 tensors take
        if type(value) is not int or not 0 <= value < MAX_SIZE:
            return False
    return True


def _entry(name: str, value: Any, data: int) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadHeader(f"describes {shown(name)} by other keys than dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadHeader(f"gives {shown(name)} the unknown dtype {shown(repr(dtype), 40)}")
    if not _sizes(shape):
        raise BadHeader(f"gives {shown(name)} the shape {shown(repr(shape), 80)}, not a list of sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadHeader(f"gives {shown(name)} the byte range {shown(repr(offsets), 80)}")
    start, stop = offsets
    if (needed := math.prod(shape) * DTYPES[dtype].itemsize) != stop - start:
        raise BadHeader(f"gives {shown(name)} {stop - start} bytes, but {dtype} {shape} takes {needed}")
    return Entry(dtype, tuple(shape), data + start, data + stop)


def parse_header(text: bytes, size: int) -> dict[str, Entry]:
    """The header `text` of a file of `size` bytes, in the order of the data.

    Raises:
        BadHeader: no JSON object of tensors, or byte ranges that overlap, leave gaps, or do not end with the file.
    """
    try:
        values = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise BadHeader(f"has a header that cannot be read ({shown(str(error))})") from None
    if not isinstance(values, dict):
        raise BadHeader(f"has a header that is {type(values).__name__}, not a JSON object")
    metadata = values.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise BadHeader("has a __metadata__ that is not a map of strings")
    data = 8 + len(text)
    entries = {name: _entry(name, value, data) for name, value in values.items()}
    entries = dict(sorted(entries.items(), key=lambda item: item[1][2:]))
    end = data
    for name, entry in entries.items():
        if entry.start != end:
            relation = "overlaps the tensor before it" if entry.start < end else "follows a gap"
            raise BadHeader(f"has a header in which {shown(name)} {relation} ({abs(entry.start - end)} bytes)")
        end = entry.stop
    if end > size:
        cut = next(name for name, entry in entries.items() if entry.stop > size)
        raise BadHeader(f"is truncated, {end - size} bytes are missing from {shown(cut)} on")
    if end < size:
        raise BadHeader(f"has {size - end} bytes after its last tensor, {shown(next(reversed(entries), 'none'))}")
    return entries
