"""A folder of safetensors files as one mapping from tensor name to bytes on disk, verified before it is read."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import pathlib
import stat
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from kdjax.checkpoint.header import BadHeader, Entry, read_header, shown, unique
from kdjax.checkpoint.layout import DTYPES, Stored
from kdjax.checkpoint.writer import INDEX, SINGLE
from kdjax.errors import KdjaxError

MAX_INDEX_BYTES = 1 << 30

# Enough reads in flight to keep an NVMe disk or a network file system busy.
READERS = 8
SMALL_READS = 256


class Located(NamedTuple):
    """Where a tensor lies."""

    file: pathlib.Path
    stored_name: str
    entry: Entry


def some(names: list[str], limit: int = 6) -> str:
    """The first few, and how many more there are: an error stays one readable line."""
    more = [f"... {len(names) - limit} more"] if len(names) > limit else []
    return ", ".join([*map(shown, names[:limit]), *more])


def listed(problems: list[str], limit: int = 20) -> str:
    """All problems in one line, as `some`."""
    more = [f"... {len(problems) - limit} more"] if len(problems) > limit else []
    return "; ".join([*problems[:limit], *more])


def _read_index(index: pathlib.Path) -> dict[str, str]:
    """`weight_map`: tensor name -> file name."""
    try:
        status = os.stat(index)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > MAX_INDEX_BYTES:
            raise ValueError(f"{status.st_size} bytes")
        weight_map = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=unique)["weight_map"]
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError("file names must be strings")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise KdjaxError(
            f"{index} has no readable weight_map ({shown(str(error)) or type(error).__name__}): download it again"
        ) from None
    return weight_map


def shards(folder: pathlib.Path) -> tuple[list[pathlib.Path], dict[str, str] | None]:
    """The files that make up the checkpoint. An index wins: files that it does not name are not part of it.

    Raises:
        KdjaxError: there is neither an index nor a single file, the index is unreadable, or it names files elsewhere.
    """
    index = folder / INDEX
    if not os.path.lexists(index):
        if not os.path.lexists(folder / SINGLE):
            raise KdjaxError(f"{folder} has neither {INDEX} nor {SINGLE}: give the folder of a checkpoint")
        return [folder / SINGLE], None
    weight_map = _read_index(index)
    names = sorted(set(weight_map.values()))
    if outside := [name or "''" for name in names if name in ("", ".", "..") or any(c in name for c in "/\\\0")]:
        raise KdjaxError(f"{index} names files outside its folder ({some(outside)}): download it again")
    return [folder / name for name in names], weight_map


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Headers of 200,000 tensors are millions of objects, which would be searched for garbage again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Source:
    """An open file, closed when it is no longer referred to.

    Raises OSError where it cannot be opened.
    """

    def __init__(self, file: pathlib.Path):
        self.descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)

    def read_into(self, located: Located, out: np.ndarray, offset: int = 0) -> None:
        """Fill the contiguous `out` with the bytes of a tensor from `offset` on. Safe to call from several threads.

        Reads, and no memory map: touching what a file has lost since it was mapped ends the process without a word.

        Raises:
            KdjaxError: the file cannot be read, or ends before the tensor does: it changed after it was opened.
        """
        rest = out.reshape(-1).view(np.uint8).data
        position = located.entry.start + offset
        while rest:
            try:
                count = os.preadv(self.descriptor, [rest], position)
            except OSError as error:
                raise KdjaxError(
                    f"{located.file}: {located.stored_name} cannot be read ({error.strerror}): check the disk"
                ) from None
            if count == 0:
                raise KdjaxError(
                    f"{located.file}: {len(rest)} bytes of {located.stored_name} are missing, the file became shorter "
                    "while it was read: download it again"
                )
            rest = rest[count:]
            position += count


class TensorFolder:
    """Names, shapes and dtypes of all tensors of a checkpoint; data is read by byte range.

    `prefix` is taken off names that have it; names that start with one of `skip` are left out and counted in
    `skipped`. With `expected`, every difference from it is an error.

    Raises:
        KdjaxError: no checkpoint; or, all in one error: files that are absent, truncated or damaged, an index that
            disagrees with them, tensors that are missing, unexpected, there twice, or of another shape or dtype.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        prefix: str = "",
        skip: tuple[str, ...] = (),
        expected: dict[str, Stored] | None = None,
    ):
        self.folder = pathlib.Path(folder)
        self.tensors: dict[str, Stored] = {}
        self.located: dict[str, Located] = {}
        self.skipped = 0
        self._open: dict[pathlib.Path, Source] = {}
        with _no_garbage_collection():
            files, weight_map = shards(self.folder)
            problems, unread = self._scan(files, weight_map, prefix, skip)
            if expected is not None:
                problems += self._differences(expected, weight_map, prefix, unread)
        if problems:
            raise KdjaxError(
                f"{self.folder} cannot be loaded: {listed(problems)}: "
                "use config.json, index and weights of one revision, downloaded completely"
            )

    def _scan(
        self, files: list[pathlib.Path], weight_map: dict[str, str] | None, prefix: str, skip: tuple[str, ...]
    ) -> tuple[list[str], set[str]]:
        """Fills `tensors`. Returns what is wrong with the files, and the names of those that could not be read."""
        problems: list[str] = []
        unread: set[str] = set()
        seen: set[str] = set()
        if absent := [file.name for file in files if not os.path.lexists(file)]:
            problems.append(f"it lacks {len(absent)} of {len(files)} shards ({some(absent)})")
            unread.update(absent)
        for file in files:
            if file.name in unread:
                continue
            try:
                header = read_header(file)
            except BadHeader as error:
                problems.append(f"{file.name} {error}")
                unread.add(file.name)
                continue
            for name, entry in header.items():
                if weight_map is not None and weight_map.get(name) != file.name:
                    continue
                seen.add(name)
                if name.startswith(skip):
                    self.skipped += 1
                    continue
                bare = name.removeprefix(prefix)
                if other := self.located.get(bare):
                    problems.append(
                        f"{file.name} holds {shown(name)} and {other.file.name} {shown(other.stored_name)}, "
                        "which are the same tensor"
                    )
                self.tensors[bare] = Stored(entry.shape, (entry.dtype,))
                self.located[bare] = Located(file, name, entry)
        if weight_map is not None:
            lost = sorted(name for name, file in weight_map.items() if name not in seen and file not in unread)
            if lost:
                where = [f"{name} in {weight_map[name]}" for name in lost]
                problems.append(f"{INDEX} names {len(lost)} tensors that their shards lack ({some(where)})")
        return problems, unread

    def _differences(
        self, expected: dict[str, Stored], weight_map: dict[str, str] | None, prefix: str, unread: set[str]
    ) -> list[str]:
        def promised(name: str) -> str | None:
            """The file in which the index says that a tensor is."""
            return None if weight_map is None else weight_map.get(prefix + name, weight_map.get(name))

        whole = SINGLE if weight_map is None else INDEX
        missing = sorted(name for name in expected.keys() - self.tensors.keys() if promised(name) is None)
        if SINGLE in unread and weight_map is None:
            missing = []
        unexpected = sorted(
            f"{self.located[name].stored_name} in {self.located[name].file.name}"
            for name in self.tensors.keys() - expected.keys()
        )
        shapes, dtypes, known = [], [], []
        for name, wanted in expected.items():
            if (found := self.located.get(name)) is None:
                continue
            if found.entry.shape != wanted.shape:
                shapes.append(
                    f"{name} in {found.file.name} is {list(found.entry.shape)}, expected {list(wanted.shape)}"
                )
            elif found.entry.dtype not in wanted.dtypes:
                dtypes.append(
                    f"{name} in {found.file.name} is {found.entry.dtype}, expected {' or '.join(wanted.dtypes)}"
                )
            elif wanted.value is not None:
                known.append(name)
        values = [
            f"{name} in {self.located[name].file.name} says {list(found)}, "
            f"config.json {list(expected[name].value or ())}"
            for name, found in zip(known, self._read_small(known), strict=True)
            if found != expected[name].value
        ]
        kinds = {
            f"missing from {whole}": missing,
            "unexpected": unexpected,
            "of another shape": sorted(shapes),
            "of another dtype": sorted(dtypes),
            "of another value": sorted(values),
        }
        found = [f"{len(names)} {kind} ({some(names)})" for kind, names in kinds.items() if names]
        return [f"tensors {'; '.join(found)}"] if found else []

    def _read_small(self, names: list[str]) -> list[tuple[int, ...]]:
        """Integer tensors of a few bytes each, of which K2.6 has 69,120; a future for each would cost more."""
        runs = [names[i : i + SMALL_READS] for i in range(0, len(names), SMALL_READS)]
        with ThreadPoolExecutor(READERS) as pool:
            read = pool.map(lambda run: [tuple(self.read(name).tolist()) for name in run], runs)
            return [value for values in read for value in values]

    def read_into(self, name: str, out: np.ndarray, offset: int = 0) -> None:
        """`Source.read_into` of the tensor `name`."""
        located = self.located[name]
        self._source(located.file).read_into(located, out, offset)

    def _source(self, file: pathlib.Path) -> Source:
        # Two threads may both open a file here; the descriptor that loses is closed with its Source.
        if file not in self._open:
            self._open.setdefault(file, Source(file))
        return self._open[file]

    def read(self, name: str) -> np.ndarray:
        """One whole tensor."""
        stored = self.tensors[name]
        out = np.empty(stored.shape, DTYPES[stored.dtypes[0]])
        self.read_into(name, out)
        return out


def sha256(folder: str | pathlib.Path) -> str:
    """One hash over `config.json` and every weight file of a checkpoint, to tell revisions of one name apart."""
    folder = pathlib.Path(folder)
    weights, _ = shards(folder)
    total = hashlib.sha256()
    for path in (folder / "config.json", *weights):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()
