"""Whether a subject fits, said before anything is made: a machine that runs out of memory may end the process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from kdjax.bench.subject import Subject
from kdjax.errors import KdjaxError
from kdjax.plan.memory import Workload


def require(subjects: Sequence[Subject], workloads: Sequence[Workload]) -> None:
    """Raises KdjaxError where the first device cannot hold the weights and caches of `subjects` at once.

    What programs need while they run comes on top and is not counted: who passes may still be too large.
    """
    meshes = [subject.mesh for subject in subjects if subject.mesh is not None]
    device = meshes[0].devices.flat[0] if meshes else jax.devices()[0]
    free = free_bytes(device)
    needed = sum(_bytes(subject, workloads) * _holders(subject, device.platform) for subject in subjects)
    if free is not None and needed > free:
        elsewhere = "or run it on a GPU" if device.platform == "cpu" else "or a mesh of more devices"
        raise KdjaxError(
            f"weights and caches take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free on {device.device_kind}: "
            f"give --smoke or fewer --layers, {elsewhere}"
        )


def free_bytes(device: Any) -> int | None:
    """Memory that can still be taken on a device, None where the system does not tell."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # all of it: macOS counts no free pages here
    return None


def _bytes(subject: Subject, workloads: Sequence[Workload]) -> int:
    trees = [subject.abstract_params().own, *(subject.abstract_state(workload).own for workload in workloads)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))


def _holders(subject: Subject, platform: str) -> int:
    """Devices of the subject that share the memory of the first: those of a CPU are one machine's."""
    return subject.mesh.devices.size if platform == "cpu" and subject.mesh is not None else 1
