"""What a loader is doing: where its time goes, and a progress bar."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class Monitor:
    """Counts bytes and seconds of one load; subclasses show them.

    Attributes:
        total, done: bytes of the checkpoint that this host reads, and has read.
        read_s: seconds in which nothing but reading went on (reads that run beside a copy cost nothing).
        transfer_s: seconds of copying to devices. On CPU devices, of widening weights.
        layout_s: seconds of bringing weights into the layout of the runtime.
    """

    def __init__(self) -> None:
        self.total = self.done = 0
        self.read_s = self.transfer_s = self.layout_s = 0.0

    def begin(self, total: int) -> None:
        self.total = total

    def advance(self, nbytes: int) -> None:
        self.done += nbytes

    def end(self) -> None:
        pass

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return self._timed("read_s")

    def transferring(self) -> contextlib.AbstractContextManager[None]:
        return self._timed("transfer_s")

    def arranging(self) -> contextlib.AbstractContextManager[None]:
        return self._timed("layout_s")


class ProgressBar(Monitor):
    """Draws bytes, bytes per second and time left on `console` while a load runs, if that is a terminal."""

    def __init__(self, console: Console, label: str):
        super().__init__()
        self._progress = Progress(
            TextColumn(label),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(label)

    def begin(self, total: int) -> None:
        super().begin(total)
        self._progress.update(self._task, total=total)
        self._progress.start()

    def advance(self, nbytes: int) -> None:
        super().advance(nbytes)
        self._progress.advance(self._task, nbytes)

    def end(self) -> None:
        self._progress.stop()
