"""The streaming writer against the safetensors library, and what it leaves behind when it fails."""

import errno
import os
import threading

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kdjax.checkpoint.layout import Stored
from kdjax.checkpoint.writer import by_size, write_folder
from kdjax.errors import KdjaxError

ARRAYS = {
    "b.scale": np.arange(15).reshape(3, 5).astype(ml_dtypes.bfloat16),
    "a.packed": np.arange(12, dtype=np.int32).reshape(4, 3),
    "é.bias": np.linspace(0, 1, 7, dtype=np.float32),
    "a.bias": np.linspace(1, 2, 3, dtype=np.float32),
    "empty": np.zeros((0, 4), np.float32),
}
TENSORS = {
    name: Stored(value.shape, ({"bfloat16": "BF16", "int32": "I32", "float32": "F32"}[value.dtype.name],))
    for name, value in ARRAYS.items()
}


def jobs(arrays=ARRAYS):
    return [lambda name=name: [(name, arrays[name])] for name in arrays]


def test_the_file_is_that_of_the_safetensors_library(tmp_path):
    write_folder(tmp_path, [TENSORS], reversed(jobs()))
    save_file(ARRAYS, tmp_path / "library", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "library").read_bytes()


def test_jobs_of_several_shards_run_in_threads_and_are_bounded(tmp_path):
    running, most, lock = 0, 0, threading.Lock()
    told = []

    def job(name):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        yield name, ARRAYS[name]
        with lock:
            running -= 1

    shards = by_size(TENSORS, 60)
    assert len(shards) == 3
    write_folder(
        tmp_path, shards, [lambda n=n: job(n) for n in ARRAYS], workers=2, progress=lambda *of: told.append(of)
    )
    total = sum(value.nbytes for value in ARRAYS.values())
    assert told == sorted(told) and len(told) == 5 and told[-1] == (total, total) and most <= 2
    read = {}
    for file in tmp_path.glob("model-*-of-000003.safetensors"):
        read |= load_file(file)
    assert read.keys() == ARRAYS.keys()
    for name, value in ARRAYS.items():
        np.testing.assert_array_equal(read[name], value)


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(KdjaxError, match=r"needs 4000000000\.00 GB and its disk has .* GB free: give another folder"):
        write_folder(tmp_path, [{"huge": Stored((10**18,), ("F32",))}], [])
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_no_weights(tmp_path, monkeypatch):
    with pytest.raises(KdjaxError, match=r"a\.packed is float64 \[4, 3\], to be written as I32 \[4, 3\]"):
        write_folder(tmp_path, [TENSORS], jobs({"a.packed": np.zeros((4, 3))}))
    with pytest.raises(KdjaxError, match=r"model\.safetensors lacks 4 tensors, a\.bias first"):
        write_folder(tmp_path, [TENSORS], jobs()[:1])
    write = os.pwrite

    def full(file, data, offset):
        if offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, offset)

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*model\.safetensors\.part'"):
        write_folder(tmp_path, [TENSORS], jobs())
    assert list(tmp_path.iterdir()) == []
