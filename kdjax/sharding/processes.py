"""Several processes, on one host or many, as one set of devices (`jax.distributed`)."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from kdjax.errors import KdjaxError

AUTO = "auto"
HEARTBEAT_SECONDS = 20
"""Silence after which a process counts as lost: the others end then at the latest, also inside a collective."""
START_SECONDS = 120
"""How long the first process waits for the others, which may be scheduled later."""


@contextlib.contextmanager
def joined(processes: str | None, agreed: str) -> Iterator[bool]:
    """Within, `jax.devices()` are those of all processes; yields whether this is the first one, which speaks for all.

    Args:
        processes: None is this process alone; "auto" asks the cluster that started it (Slurm, Kubernetes, Open MPI);
            else "HOST:PORT,COUNT,INDEX", where the process of index 0 listens at HOST:PORT.
        agreed: what must be the same in every process for them to run the same program, such as its settings.

    Raises:
        KdjaxError: `processes` cannot be read, the processes do not find each other or do not agree, or one was lost.
    """
    if processes is None:
        yield True
        return
    _join(processes)
    try:
        _check_agreement(agreed)
        yield jax.process_index() == 0
    except jax.errors.JaxRuntimeError as error:
        # Without shutdown, which would wait for the one that is gone.
        raise KdjaxError(
            f"process {jax.process_index()} of {jax.process_count()}: another process was lost "
            f"({str(error).splitlines()[0][:200]}): see its own output, then start all again"
        ) from error
    jax.distributed.shutdown()


def _join(processes: str) -> None:
    explicit = {}
    if processes != AUTO:
        coordinator, count, index = _parse(processes)
        explicit = {
            "coordinator_address": coordinator,
            "num_processes": count,
            "process_id": index,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **explicit, initialization_timeout=START_SECONDS, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
        )
    except (RuntimeError, ValueError) as error:
        raise KdjaxError(
            f"processes={processes}: cannot join the others ({str(error).splitlines()[0][:200]}): start all of them "
            "within two minutes, with the same HOST:PORT and COUNT, or under Slurm, Kubernetes or Open MPI"
        ) from error


def _parse(processes: str) -> tuple[str, int, int]:
    try:
        coordinator, count, index = processes.split(",")
        host, port = coordinator.rsplit(":", 1)
        found = coordinator, int(count), int(index)
        valid = bool(host) and 0 < int(port) < 2**16 and 0 <= found[2] < found[1]
    except ValueError:
        valid = False
    if not valid:
        raise KdjaxError(
            f"processes={processes!r} is neither auto nor HOST:PORT,COUNT,INDEX with INDEX below COUNT: "
            "for instance 10.0.0.1:9876,2,0 and 10.0.0.1:9876,2,1"
        )
    return found


def _check_agreement(agreed: str) -> None:
    digest = np.frombuffer(hashlib.sha256(agreed.encode()).digest(), np.uint8)
    everyone = np.asarray(multihost_utils.process_allgather(digest))
    if differ := sorted(set(np.flatnonzero((everyone != everyone[0]).any(axis=-1)).tolist())):
        raise KdjaxError(
            f"processes {differ} were started with other settings or prompts than process 0: start all of them alike"
        )
