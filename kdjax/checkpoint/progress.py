"""How far a loader is, and where its time goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from kdjax.checkpoint.writer import Progress


class Monitor:
    """Counts bytes and seconds of one load. `progress` is told the bytes done and the bytes in all, chunk by chunk.

    Attributes:
        total, done: bytes of the checkpoint that this host reads, and has read.
        read_s: seconds in which nothing but reading went on (reads that run beside a copy cost nothing).
        transfer_s: seconds of copying to devices. On CPU devices, of widening weights.
        layout_s: seconds of bringing weights into the layout of the runtime.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self.total = self.done = 0
        self.read_s = self.transfer_s = self.layout_s = 0.0

    def begin(self, total: int) -> None:
        """A load of `total` bytes starts."""
        self.total, self.done = total, 0

    def advance(self, nbytes: int) -> None:
        """So many more bytes were read."""
        self.done += nbytes
        if self._progress:
            self._progress(self.done, self.total)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """The time within counts as `read_s`."""
        return self._timed("read_s")

    def transferring(self) -> contextlib.AbstractContextManager[None]:
        """The time within counts as `transfer_s`."""
        return self._timed("transfer_s")

    def arranging(self) -> contextlib.AbstractContextManager[None]:
        """The time within counts as `layout_s`."""
        return self._timed("layout_s")
