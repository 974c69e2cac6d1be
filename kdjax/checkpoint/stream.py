"""Tensors on disk -> arrays on devices, in chunks, so that host memory stays bounded and reading never waits.

Every byte is read once per host, whatever the mesh: rows of a tensor are contiguous on disk, so where a mesh splits
columns, whole rows are read and cut in memory for all devices at once. Reads run in threads while the chunk before is
on its way to the devices. On CPU devices the bytes are read straight into the memory that the array then is.
"""

from __future__ import annotations

import collections
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from kdjax.checkpoint.files import READERS, TensorFolder, listed
from kdjax.checkpoint.progress import Monitor
from kdjax.errors import KdjaxError

# One read system call, and all staging buffers together; a chunk is a quarter of these, so that four are in flight.
READ_BYTES = 16 << 20
STAGING_BYTES = 512 << 20

Check = Callable[[np.ndarray], str | None]


class Part(NamedTuple):
    """One array [*lead, rows, ...] on devices, and the tensors of which it is made.

    Attributes:
        names: one tensor, or with `stacked` one per entry of the first axis.
        shape: of the whole array.
        stored: dtype of the bytes on disk.
        dtype: of the array; differs from `stored` only where the runtime computes in another precision.
        sharding: which device holds what.
        check: says what is wrong with the values of some rows of a tensor, if anything.
    """

    names: tuple[str, ...]
    stacked: bool
    shape: tuple[int, ...]
    stored: np.dtype
    dtype: np.dtype
    sharding: Sharding
    check: Check | None = None

    @property
    def nbytes(self) -> int:
        """On disk."""
        return math.prod(self.shape) * self.stored.itemsize


class _Shard(NamedTuple):
    """The same block of an array on one device or more: its first entry of every axis, and what it takes of each."""

    starts: tuple[int, ...]
    devices: tuple[Any, ...]


class _Layout:
    """How `part` is cut: all shards have one shape."""

    def __init__(self, part: Part):
        self.part = part
        self.shape = part.sharding.shard_shape(part.shape)
        by_start: dict[tuple[int, ...], list[Any]] = {}
        for device, index in part.sharding.addressable_devices_indices_map(part.shape).items():
            starts = tuple(s.start or 0 for s in index or ())
            by_start.setdefault(starts + (0,) * (len(part.shape) - len(starts)), []).append(device)
        self.shards = [_Shard(starts, tuple(devices)) for starts, devices in by_start.items()]
        self.row_bytes = math.prod(self.shape[1:]) * part.stored.itemsize * len(self.shards)

    def assemble(self, shape: tuple[int, ...], blocks: Sequence[np.ndarray]) -> jax.Array:
        """One block per shard -> the array, or a run of its first axis, of which `shape` is one shard's block."""
        arrays = [
            jax.device_put(block, device)
            for shard, block in zip(self.shards, blocks, strict=True)
            for device in shard.devices
        ]
        counts = [whole // part for whole, part in zip(self.part.shape, self.shape, strict=True)]
        whole = tuple(n * count for n, count in zip(shape, counts, strict=True))
        return jax.make_array_from_single_device_arrays(whole, self.part.sharding, arrays)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Page-aligned, so that XLA's CPU backend takes the memory as it is instead of copying it."""
    count = math.prod(shape) * dtype.itemsize
    raw = np.empty(count + 4096, np.uint8)
    offset = -raw.ctypes.data % 4096
    return raw[offset : offset + count].view(dtype).reshape(shape)


class _HostArray:
    """An array of CPU devices, filled in place."""

    def __init__(self, layout: _Layout):
        self.layout = layout
        self.whole = [_aligned(layout.shape, layout.part.dtype) for _ in layout.shards]

    def blocks(self, start: int, stop: int) -> list[np.ndarray]:
        part = self.layout.part
        if part.dtype != part.stored:
            return [np.empty((stop - start, *self.layout.shape[1:]), part.stored) for _ in self.whole]
        return [whole[start:stop] for whole in self.whole]

    def commit(self, start: int, blocks: list[np.ndarray]) -> None:
        if self.layout.part.dtype != self.layout.part.stored:
            for whole, block in zip(self.whole, blocks, strict=True):
                whole[start : start + len(block)] = block

    def finish(self) -> jax.Array:
        return self.layout.assemble(self.layout.shape, self.whole)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write(whole: jax.Array, chunk: jax.Array, start: jax.Array, sharding: Sharding) -> jax.Array:
    """`chunk` into every shard of `whole`, from its row `start` on."""

    def write(whole, chunk, start):
        return lax.dynamic_update_slice_in_dim(whole, chunk.astype(whole.dtype), start, axis=0)

    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        write = jax.shard_map(
            write, mesh=sharding.mesh, in_specs=(spec, spec, PartitionSpec()), out_specs=spec, check_vma=False
        )
    return write(whole, chunk, start)


class _DeviceArray:
    """An array of accelerators, filled by chunks that are copied there one after another."""

    def __init__(self, layout: _Layout):
        self.layout = layout
        self.whole: jax.Array | None = None

    def blocks(self, start: int, stop: int) -> list[np.ndarray]:
        return [np.empty((stop - start, *self.layout.shape[1:]), self.layout.part.stored) for _ in self.layout.shards]

    def commit(self, start: int, blocks: list[np.ndarray]) -> None:
        part = self.layout.part
        chunk = self.layout.assemble(blocks[0].shape, blocks)
        # The staging memory is free when the copy is over.
        jax.block_until_ready(chunk)
        if blocks[0].shape == self.layout.shape:
            self.whole = chunk if part.dtype == part.stored else chunk.astype(part.dtype)
            return
        if self.whole is None:
            self.whole = jnp.zeros(part.shape, part.dtype, device=part.sharding)
        self.whole = _write(self.whole, chunk, np.int32(start), part.sharding)

    def finish(self) -> jax.Array:
        assert self.whole is not None
        return self.whole


_of_thread = threading.local()


def _scratch(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory of the calling thread, valid until it calls again: fresh pages for every read would be zeroed first."""
    count = math.prod(shape) * dtype.itemsize
    if getattr(_of_thread, "buffer", np.empty(0, np.uint8)).nbytes < count:
        _of_thread.buffer = np.empty(count, np.uint8)
    return _of_thread.buffer[:count].view(dtype).reshape(shape)


class _Read(NamedTuple):
    """Rows `start` to `stop` of one tensor, and the blocks that take (rows of the read, columns) of them."""

    name: str
    part: Part
    start: int
    stop: int
    targets: list[tuple[np.ndarray, tuple[slice, ...]]]

    def run(self, files: TensorFolder) -> str | None:
        """Returns what is wrong with the values."""
        located = files.located[self.name]
        rest = located.entry.shape[1:]
        row_bytes = math.prod(rest) * self.part.stored.itemsize
        shape = (self.stop - self.start, *rest)
        (target, _), *others = self.targets
        direct = not others and target.shape == shape and target.flags.c_contiguous
        rows = target if direct else _scratch(shape, self.part.stored)
        files.read_into(self.name, rows, self.start * row_bytes)
        if not direct:
            for block, taken in self.targets:
                block[...] = rows[taken]
        problem = self.part.check(rows) if self.part.check else None
        return problem and f"{self.name} in {located.file.name} {problem}"


class _Chunk(NamedTuple):
    part: int
    array: _HostArray | _DeviceArray
    start: int
    blocks: list[np.ndarray]
    reads: list[_Read]
    last: bool

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


def _reads(layout: _Layout, start: int, blocks: list[np.ndarray]) -> Iterator[_Read]:
    """What fills `blocks`, the run from `start` on of the first axis of every shard."""
    part = layout.part
    count = len(blocks[0])
    by_lead: dict[int, list[tuple[_Shard, np.ndarray]]] = {}
    for shard, block in zip(layout.shards, blocks, strict=True):
        by_lead.setdefault(shard.starts[0] + start, []).append((shard, block))
    for lead, members in by_lead.items():
        if part.stacked:
            for i in range(count):
                places = [(shard.starts[1], shard.starts[2:], block[i]) for shard, block in members]
                yield from _tensor_reads(part, part.names[lead + i], places)
        else:
            places = [(lead, shard.starts[1:], block) for shard, block in members]
            yield from _tensor_reads(part, part.names[0], places)


def _tensor_reads(part: Part, name: str, places: list[tuple[int, tuple[int, ...], np.ndarray]]) -> Iterator[_Read]:
    """Reads of one tensor for blocks that begin at (row, columns) of it."""
    width = part.shape[2:] if part.stacked else part.shape[1:]
    step = max(1, READ_BYTES // (math.prod(width) * part.stored.itemsize))
    first = min(row for row, _, _ in places)
    end = max(row + len(block) for row, _, block in places)
    for start in range(first, end, step):
        stop = min(start + step, end)
        targets = []
        for row, columns, block in places:
            a, b = max(start, row), min(stop, row + len(block))
            if a < b:
                cut = tuple(slice(c, c + n) for c, n in zip(columns, block.shape[1:], strict=True))
                targets.append((block[a - row : b - row], (slice(a - start, b - start), *cut)))
        if targets:
            yield _Read(name, part, start, stop, targets)


def _in_host_memory(sharding: Sharding) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"


def _chunks(parts: Sequence[Part]) -> Iterator[_Chunk]:
    for number, part in enumerate(parts):
        layout = _Layout(part)
        array = (_HostArray if _in_host_memory(part.sharding) else _DeviceArray)(layout)
        rows = layout.shape[0]
        step = max(1, STAGING_BYTES // 4 // layout.row_bytes)
        for start in range(0, rows, step):
            blocks = array.blocks(start, min(start + step, rows))
            yield _Chunk(number, array, start, blocks, list(_reads(layout, start, blocks)), start + step >= rows)


def stream(files: TensorFolder, parts: Sequence[Part], monitor: Monitor) -> Iterator[jax.Array]:
    """The arrays of `parts`, in that order.

    Staging buffers take `STAGING_BYTES` of host memory, or those of one row of an array where that is more, and
    `READ_BYTES` per thread where columns are cut. Arrays of CPU devices are themselves host memory.

    Raises:
        KdjaxError: a file cannot be read, or a `check` fails; all failures of the chunks in flight are in one error.
    """
    queue: collections.deque[tuple[_Chunk, list[Future[str | None]]]] = collections.deque()
    in_flight = 0
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="kdjax-read")

    def finish() -> Iterator[jax.Array]:
        nonlocal in_flight
        chunk, futures = queue.popleft()
        with monitor.reading():
            problems = [problem for future in futures if (problem := future.result())]
            if problems:
                problems += [p for _, others in queue for future in others if (p := future.result())]
                raise KdjaxError(f"{files.folder} is damaged: {listed(problems)}: download these files again")
        with monitor.transferring():
            chunk.array.commit(chunk.start, chunk.blocks)
            done = chunk.array.finish() if chunk.last else None
        in_flight -= chunk.nbytes
        monitor.advance(chunk.nbytes)
        if done is not None:
            yield done

    try:
        for chunk in _chunks(parts):
            while queue and in_flight + chunk.nbytes > STAGING_BYTES:
                yield from finish()
            in_flight += chunk.nbytes
            queue.append((chunk, [pool.submit(read.run, files) for read in chunk.reads]))
        while queue:
            yield from finish()
    finally:
        pool.shutdown(cancel_futures=True)
