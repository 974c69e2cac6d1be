"""Bytes per second and time left: a bar on stderr, or in the line of a status that is shown already."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator

from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.status import Status


@contextlib.contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields the function that is told the bytes done and the bytes in all. Shown on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield tell


def progress_in(status: Status) -> Callable[[int, int], None]:
    """What to tell the bytes read so far and the bytes in all; what takes less than a second is not shown."""
    started = time.monotonic()

    def tell(done: int, total: int) -> None:
        seconds = time.monotonic() - started
        if seconds < 1 or not done:
            return
        left = datetime.timedelta(seconds=round(seconds * (total - done) / done))
        status.update(
            f"reading weights: {filesize.decimal(done)} of {filesize.decimal(total)}, "
            f"{filesize.decimal(int(done / seconds))}/s, {left} left"
        )

    return tell
