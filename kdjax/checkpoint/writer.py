"""The writer of safetensors folders: space is reserved first, tensors arrive one at a time, from several threads."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from kdjax.checkpoint.layout import DTYPES, Stored
from kdjax.errors import KdjaxError
from kdjax.output import write_text

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Shard = dict[str, Stored]
Job = Callable[[], Iterable[tuple[str, np.ndarray]]]
Progress = Callable[[int, int], None]
"""Told the bytes done and the bytes in all."""


def by_size(tensors: dict[str, Stored], max_shard_bytes: int | None) -> list[Shard]:
    """The tensors in their order, a new shard wherever `max_shard_bytes` (None: no limit) would be exceeded."""
    shards: list[Shard] = [{}]
    filled = 0
    for name, stored in tensors.items():
        if shards[-1] and max_shard_bytes is not None and filled + stored.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = stored
        filled += stored.nbytes
    return shards


class SafetensorsFile:
    """One file under construction, `PATH.part` until `finish`. `write` may be called from several threads.

    Laid out as the safetensors library does, byte for byte: widest dtype first, which keeps every tensor aligned.
    """

    def __init__(self, path: pathlib.Path, tensors: Shard, metadata: dict[str, str]):
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self._tensors = tensors
        self._missing = set(tensors)
        header: dict[str, object] = {"__metadata__": metadata}
        end = 0
        offsets = {}

        def place(name: str) -> tuple[int, str, str]:
            (dtype, *_) = tensors[name].dtypes
            return -DTYPES[dtype].itemsize, dtype, name

        for name in sorted(tensors, key=place):
            stored = tensors[name]
            offsets[name], end = end, end + stored.nbytes
            header[name] = {
                "dtype": stored.dtypes[0],
                "shape": list(stored.shape),
                "data_offsets": [offsets[name], end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        self._offsets = {name: start + offset for name, offset in offsets.items()}
        self._file = os.open(self.part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.ftruncate(self._file, start + end)
        self._put(len(text).to_bytes(8, "little") + text, 0)

    def write(self, name: str, value: np.ndarray) -> None:
        stored = self._tensors[name]
        if value.shape != stored.shape or value.dtype != DTYPES[stored.dtypes[0]]:
            raise KdjaxError(
                f"{name} is {value.dtype} {list(value.shape)}, to be written as {stored.dtypes[0]} "
                f"{list(stored.shape)}: convert it first"
            )
        self._put(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data, self._offsets[name])
        self._missing.remove(name)

    def finish(self) -> None:
        if self._missing:
            raise KdjaxError(f"{self.path} lacks {len(self._missing)} tensors, {min(self._missing)} first: write them")
        os.close(self._file)
        self.part.rename(self.path)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)
        self.part.unlink(missing_ok=True)

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        rest = memoryview(data)
        try:
            while rest:  # one call writes at most 2 GiB
                done = os.pwrite(self._file, rest, offset)
                rest, offset = rest[done:], offset + done
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.part)) from None


def write_folder(
    folder: str | pathlib.Path,
    shards: Sequence[Shard],
    jobs: Iterable[Job],
    *,
    workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write `shards` as Hugging Face does: one `model.safetensors`, or numbered files and an index, which comes last.

    Each job makes some of the tensors; `workers` jobs run at once, and no more tensors than theirs are in memory.
    What an error leaves unfinished is removed.

    Raises:
        KdjaxError: the folder already holds weights, which the new ones would mix with, or its disk lacks room.
    """
    folder = pathlib.Path(folder)
    if stale := sorted(path.name for path in folder.glob("*.safetensors*")):
        some = ", ".join(stale[:6]) + (", ..." if len(stale) > 6 else "")
        raise KdjaxError(f"{folder} already holds weights ({some}): give an empty folder or remove them")
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(stored.nbytes for shard in shards for stored in shard.values())
    if total > (free := shutil.disk_usage(folder).free):
        raise KdjaxError(
            f"{folder} needs {total / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free: give another folder or "
            "make room"
        )
    # Kimi's own naming: five digits for the shard, six for the total.
    names = [f"model-{i:05d}-of-{len(shards):06d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE]
    files: list[SafetensorsFile] = []
    try:
        for name, shard in zip(names, shards, strict=True):
            # transformers refuses files without this metadata.
            files.append(SafetensorsFile(folder / name, shard, {"format": "pt"}))
        home = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}

        def work(job: Job) -> int:
            nbytes = 0
            for name, value in job():
                home[name].write(name, value)
                nbytes += value.nbytes
            return nbytes

        done = 0
        with ThreadPoolExecutor(workers) as pool:
            running: collections.deque[Future[int]] = collections.deque()
            for job in itertools.chain(jobs, [None] * workers):  # what still runs ends in the place of later jobs
                if running and (job is None or len(running) == workers):
                    done += running.popleft().result()
                    progress(done, total)
                if job:
                    running.append(pool.submit(work, job))
        for file in files:
            file.finish()
    except BaseException:
        for file in files:
            file.discard()
        raise
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
        }
        write_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
