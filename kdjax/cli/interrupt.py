"""Ctrl-C as a message instead of an exception.

A KeyboardInterrupt raised while XLA compiles is lost where it meets a callback of XLA or of the garbage collector, and
the interpreter's own end aborts on a thread that is still inside XLA. So decoding runs in a thread of its own, the main
thread only waits and prints, and a process that leaves such a thread behind ends by `os._exit`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
EXIT_INTERRUPTED = 130
LOOK_EVERY = 0.5
"""Seconds. A signal that comes just before the main thread begins to wait does not wake it: its handler runs when the
wait ends."""


class Interrupt:
    """With nothing to keep yet, and the second time, Ctrl-C ends the process at once; otherwise it sets `pressed`."""

    def __init__(self) -> None:
        self.pressed = False
        self._wake: Callable[[], None] | None = None
        self._workers: list[threading.Thread] = []

    @contextlib.contextmanager
    def handled(self) -> Iterator[Interrupt]:
        """Handles Ctrl-C within. Where the process ignores it, or its owner handles it, that stays so."""
        free = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT)
        if not free or before is not signal.default_int_handler:
            yield self
            return
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    @property
    def abandoned(self) -> bool:
        """Whether a thread is still decoding, though nobody waits for it."""
        return any(worker.is_alive() for worker in self._workers)

    def iterate(self, source: Iterator[T]) -> Iterator[T]:
        """The items of `source`, which runs in a thread; fewer once `pressed`. Raises what it raises.

        An item, from the first one on, is worth keeping.
        """
        arrivals: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

        def work() -> None:
            try:
                for item in source:
                    arrivals.put(("item", item))
                arrivals.put(("end", None))
            except BaseException as error:
                arrivals.put(("error", error))

        def wake() -> None:
            arrivals.put(("pressed", None))  # SimpleQueue.put may be called by a signal handler

        if self._wake:
            self._wake = wake
        worker = threading.Thread(target=work, daemon=True)
        self._workers.append(worker)
        worker.start()
        while not self.pressed:
            try:
                kind, value = arrivals.get(timeout=LOOK_EVERY)
            except queue.Empty:
                continue
            if kind == "error":
                worker.join()  # it ends by itself, and would count as abandoned until then
                raise value
            if kind != "item":
                break
            self._wake = wake
            yield value
        if not self.pressed:
            worker.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.pressed or not self._wake:
            _leave()
        self.pressed = True
        self._wake()


def _leave() -> NoReturn:
    # Not print: the signal may have come in the middle of one. All text shown so far is flushed.
    erase_line_and_show_cursor = b"\r\x1b[2K\x1b[?25h" if os.isatty(2) else b""
    with contextlib.suppress(OSError):
        os.write(2, erase_line_and_show_cursor + b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def exit_now(status: int) -> NoReturn:
    """Ends the process without waiting for its threads; what cannot be written is lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
