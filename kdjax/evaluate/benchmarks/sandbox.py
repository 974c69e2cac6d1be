"""Runs a program that a model wrote, with its tests, in a process that is limited in every way that is cheap.

What is limited: CPU and wall-clock seconds, memory, size of files, processes and threads (none may be started), open
files; environment (empty), working folder (its own, removed afterwards), user (nobody, where this process is root) and,
where the kernel allows namespaces, network (none) and the life of everything it started. What is not: it can read and
write whatever files its user can. That is enough for programs that are merely wrong. Run programs of a model you have
reason to distrust inside a container or a virtual machine.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kdjax.errors import KdjaxError
from kdjax.evaluate.benchmarks import sandbox_child

Outcome = Literal["passed", "wrong", "exception", "exited", "timeout", "crashed"]

REPORT_BYTES = 64 * 2**10


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`wall_s` and `cpu_s` in seconds; `memory_mb` of address space, `file_mb` of each file written, in MiB."""

    wall_s: Annotated[float, Meta(gt=0)] = 10.0
    cpu_s: Annotated[int, Meta(ge=1)] = 5
    memory_mb: Annotated[int, Meta(ge=64)] = 1024
    file_mb: Annotated[int, Meta(ge=0)] = 8


class Execution(NamedTuple):
    """How a program ended.

    "passed": all parts ran to their end. "wrong": an assertion failed. "exception": anything else was raised, a syntax
    error included. "exited": it left before its tests were through. "timeout": a limit of seconds. "crashed": a signal.
    `isolated` says whether it ran without network; None where it could not say.
    """

    outcome: Outcome
    detail: str = ""
    isolated: bool | None = None

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


def execute(parts: Sequence[str], limits: Limits) -> Execution:
    """Runs `parts` (the program, then its tests) one after another as one module.

    Each part is compiled by itself: nothing that the program leaves open swallows its tests. It has passed only where
    the process says so with a secret made for this run, after the last part.
    """
    secret = secrets.token_hex(16)
    job = {"parts": list(parts), "limits": msgspec.to_builtins(limits), "secret": secret}
    with tempfile.TemporaryDirectory(prefix="kdjax-", ignore_cleanup_errors=True) as folder:
        if os.getuid() == 0:
            os.chmod(folder, 0o777)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", sandbox_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            said, timed_out = _converse(process, json.dumps(job).encode(), time.monotonic() + limits.wall_s)
        finally:
            _end(process)
    return _judge(said, secret, timed_out, process.returncode, limits)


def check(limits: Limits) -> Execution:
    """Runs a program that must pass, worth doing before anything is generated.

    Raises KdjaxError where it does not: then no program would.
    """
    execution = execute(["import collections, math, typing\nanswer = 42", "assert answer == 42"], limits)
    if not execution.passed:
        raise KdjaxError(
            f"the sandbox cannot run a program that must pass ({execution.outcome} {execution.detail}): "
            "raise the limits in [sandbox]; where this process is root, the user nobody must be able to read Python"
        )
    return execution


def _converse(process: subprocess.Popen[bytes], job: bytes, deadline: float) -> tuple[bytes, bool]:
    """Sends the job; the first line that comes back, or what came until the pipe closed or time was up."""
    assert process.stdin is not None and process.stdout is not None
    try:
        with process.stdin as stdin:
            stdin.write(job)
    except BrokenPipeError:
        pass
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while b"\n" not in said and len(said) < REPORT_BYTES:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                return said, True
            piece = os.read(process.stdout.fileno(), REPORT_BYTES)
            if not piece:
                try:
                    process.wait(max(deadline - time.monotonic(), 0))
                except subprocess.TimeoutExpired:
                    return said, True
                break
            said += piece
    return said, False


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole session, whatever is still in it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _judge(said: bytes, secret: str, timed_out: bool, code: int, limits: Limits) -> Execution:
    try:
        report = json.loads(said.split(b"\n")[0])
        if report.pop("secret") == secret:
            return Execution(**report)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    if timed_out:
        return Execution("timeout", f"after {limits.wall_s:g} s")
    number = code - sandbox_child.ENDED_BY_SIGNAL
    if number in (signal.SIGXCPU, signal.SIGKILL):
        return Execution("timeout", f"after {limits.cpu_s} s of CPU time")
    if number > 0:
        return Execution("crashed", signal.Signals(number).name)
    return Execution("exited", "it ended its process before its tests were through")
