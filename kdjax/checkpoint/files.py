"""A folder of safetensors files as one mapping from tensor name to array."""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open

from kdjax.checkpoint.layout import Stored
from kdjax.checkpoint.writer import INDEX, SINGLE
from kdjax.errors import KdjaxError


def _shards(folder: pathlib.Path) -> tuple[list[pathlib.Path], dict[str, str] | None]:
    """The files that make up the checkpoint. An index wins: files that it does not name are not part of it."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise KdjaxError(f"{folder} has neither {INDEX} nor {SINGLE}: give the folder of a checkpoint")
        return [folder / SINGLE], None
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(pathlib.PurePath(name).name for name in set(weight_map.values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise KdjaxError(f"{index} has no readable weight_map ({error!r}): download it again") from None
    if absent := [name for name in names if not (folder / name).exists()]:
        raise KdjaxError(f"{folder} lacks {len(absent)} of {len(names)} shards ({', '.join(absent)}): download them")
    return [folder / name for name in names], weight_map


def _missing_bytes(shard: pathlib.Path) -> int:
    """How many bytes a truncated file lacks, by its own header; 0 where the header itself is unreadable."""
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = shard.stat().st_size
        if length > size - 8:
            return 8 + length - size
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return 0
    return max(0, 8 + length + max(ends, default=0) - size)


class TensorFolder:
    """Names, shapes and dtypes of all tensors of a checkpoint; data is read one tensor at a time.

    Files are memory-mapped, so an open folder costs no memory until a tensor is read. `prefix` is taken off names that
    have it; names that start with one of `skip` are left out and counted in `skipped`.

    Raises:
        KdjaxError: no checkpoint, a shard that is absent, truncated or damaged, or an index that disagrees with it.
    """

    def __init__(self, folder: str | pathlib.Path, prefix: str = "", skip: tuple[str, ...] = ()):
        self.folder = pathlib.Path(folder)
        shards, weight_map = _shards(self.folder)
        self.tensors: dict[str, Stored] = {}
        self.skipped = 0
        self._sources: dict[str, tuple[Any, str]] = {}
        seen = set()
        for shard in shards:
            try:
                handle = safe_open(shard, framework="np")
            except (SafetensorError, OSError) as error:
                missing = _missing_bytes(shard)
                reason = f"is truncated, {missing} bytes are missing" if missing else f"is damaged ({error})"
                raise KdjaxError(f"{shard} {reason}: download it again") from None
            for name in handle.keys():  # noqa: SIM118  the handle is not iterable
                if weight_map is not None and weight_map.get(name) != shard.name:
                    continue
                seen.add(name)
                if name.startswith(skip):
                    self.skipped += 1
                    continue
                bare = name.removeprefix(prefix)
                if bare in self.tensors:
                    raise KdjaxError(f"{shard} holds {name} a second time: remove one of the copies")
                part = handle.get_slice(name)
                self.tensors[bare] = Stored(tuple(part.get_shape()), (part.get_dtype(),))
                self._sources[bare] = (handle, name)
        if weight_map is not None and (lost := sorted(set(weight_map) - seen)):
            raise KdjaxError(
                f"{self.folder / INDEX} names {len(lost)} tensors that their shards lack ({_some(lost)}): "
                "download index and shards of one revision"
            )

    def read(self, name: str) -> np.ndarray:
        handle, stored_name = self._sources[name]
        return handle.get_tensor(stored_name)

    def check(self, expected: dict[str, Stored]) -> None:
        """Compare names, shapes and dtypes with `expected` and report every difference in one error."""
        both = sorted(expected.keys() & self.tensors.keys())
        problems = {
            "missing": sorted(expected.keys() - self.tensors.keys()),
            "unexpected": sorted(self.tensors.keys() - expected.keys()),
            "of another shape": [
                f"{name} is {list(self.tensors[name].shape)}, expected {list(expected[name].shape)}"
                for name in both
                if self.tensors[name].shape != expected[name].shape
            ],
            "of another dtype": [
                f"{name} is {self.tensors[name].dtypes[0]}, expected {' or '.join(expected[name].dtypes)}"
                for name in both
                if self.tensors[name].dtypes[0] not in expected[name].dtypes
            ],
        }
        if found := [f"{len(names)} {kind} ({_some(names)})" for kind, names in problems.items() if names]:
            raise KdjaxError(
                f"{self.folder} does not hold what its config.json describes: tensors {'; '.join(found)}: "
                "use config.json and weights of one revision"
            )


def _some(names: list[str], limit: int = 6) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def sha256(folder: str | pathlib.Path) -> str:
    """One hash over `config.json` and every weight file of a checkpoint, to tell revisions of one name apart."""
    folder = pathlib.Path(folder)
    shards, _ = _shards(folder)
    total = hashlib.sha256()
    for path in (folder / "config.json", *shards):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()
