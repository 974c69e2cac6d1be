"""Processes that compile programs for the one that measures them.

Tracing and lowering hold Python's lock, so threads compile little faster than one of them, and hold up the launches of
the thread that measures.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Hashable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import jax
from jax.experimental import serialize_executable

Job = Callable[[], jax.stages.Compiled]
LONGEST = 180.0
"""Seconds after which a job is given up: Triton can take minutes over a kernel that would be slow as well."""


class CompileError(Exception):
    """What a job raised, or how its process ended."""


class Compilers:
    """`count` processes with one job each at a time; the program of a job is loaded on this process's first device.

    A job is a picklable call of a function that an import finds. Each process has a JAX of its own, with the same
    environment and so the same devices, but takes none of their memory in advance and gives way to this process.
    """

    def __init__(self, count: int, longest: float = LONGEST) -> None:
        self._workers = [_Worker() for _ in range(count)]
        self._longest = longest

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    @property
    def idle(self) -> int:
        """How many jobs can be started."""
        return sum(worker.key is None for worker in self._workers)

    def start(self, key: Hashable, job: Job) -> None:
        """Raises StopIteration where no process is idle."""
        worker = next(worker for worker in self._workers if worker.key is None)
        if not worker.process.is_alive():
            worker = self._replace(worker)
        worker.start(key, job)

    def finished(self, timeout: float) -> Iterator[tuple[Any, Callable[..., Any] | CompileError]]:
        """Key and program, or error, of the jobs that are done, after at most `timeout` seconds of waiting for one."""
        busy = [worker for worker in self._workers if worker.key is not None]
        if not busy:
            return
        limit = min(worker.started for worker in busy) + self._longest
        ready = wait([worker.connection for worker in busy], max(0.0, min(timeout, limit - time.monotonic())))
        for worker in busy:
            late = time.monotonic() - worker.started >= self._longest
            if worker.connection not in ready and not late:
                continue
            key = worker.key
            try:
                answer = worker.answer() if worker.connection in ready else f"no result after {self._longest:.0f} s"
            except (EOFError, ConnectionError):
                worker.process.join()
                answer = f"the compiler ended with exit code {worker.process.exitcode}"
            if isinstance(answer, str):
                if worker.key is not None:  # it hangs or is dead
                    self._replace(worker)
                yield key, CompileError(answer)
            else:
                yield key, _load(answer)

    def _replace(self, worker: _Worker) -> _Worker:
        worker.end()
        self._workers[self._workers.index(worker)] = new = _Worker()
        return new


@dataclasses.dataclass(eq=False)
class _Worker:
    """A process and the job it has."""

    key: Hashable | None = None
    started: float = 0.0

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share the parent's device
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, key: Hashable, job: Job) -> None:
        self.key, self.started = key, time.monotonic()
        self.connection.send(job)

    def answer(self) -> Any:
        answer = self.connection.recv()
        self.key = None
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its compilers
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.nice(10)
    while True:
        try:
            answer = serialize_executable.serialize(connection.recv()())
        except EOFError:
            return
        except Exception as failure:
            answer = f"{type(failure).__name__}: {failure}"
        connection.send(answer)


def _load(answer: tuple[Any, ...]) -> jax.stages.Compiled | CompileError:
    try:
        return serialize_executable.deserialize_and_load(*answer, execution_devices=jax.devices()[:1])
    except Exception as failure:
        return CompileError(f"{type(failure).__name__}: {failure}")
