"""A profile of the device, and where it waited: the largest gaps between what ran."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

from kdjax.errors import KdjaxError


class Event(NamedTuple):
    """What a device did; nanoseconds."""

    name: str
    start: float
    duration: float


class Gap(NamedTuple):
    us: float
    at_us: float
    """After the first event."""
    after: str
    before: str


class Idle(NamedTuple):
    """How a device's time from its first event to its last went."""

    device: str
    span_us: float
    busy_us: float
    gaps: list[Gap]
    """The largest first."""

    @property
    def fraction(self) -> float:
        """Of the span, in which nothing ran."""
        return 1 - self.busy_us / self.span_us if self.span_us else 0.0


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Writes a profile of what runs within to `folder`, for `idle` and for TensorBoard or Perfetto."""
    with jax.profiler.trace(str(folder)):
        yield


def idle(folder: Path, largest: int = 10) -> list[Idle]:
    """Of every device in the newest profile below `folder`.

    Raises:
        KdjaxError: there is no profile, or it has no device.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise KdjaxError(f"{folder} holds no profile (*.xplane.pb): record one with kdjax bench step --trace {folder}")
    found = idle_of(ProfileData.from_file(str(files[-1])), largest)
    if not found:
        raise KdjaxError(f"{files[-1]} has no events of a GPU: record it where one runs")
    return found


def idle_of(profile: Any, largest: int) -> list[Idle]:
    return [
        waits(plane.name, events, largest)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU") and (events := list(_on_streams(plane)))
    ]


def _on_streams(plane: Any) -> Iterator[Event]:
    """Kernels and copies. Other lines of a device's plane repeat them, grouped."""
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                yield Event(event.name, event.start_ns, event.duration_ns)


def waits(device: str, events: Iterable[Event], largest: int) -> Idle:
    """Streams run side by side: a device waits where none of them does."""
    ordered = sorted(events, key=lambda event: event.start)
    first, gaps, busy = ordered[0], [], 0.0
    last, end = first, first.start
    for event in ordered:
        if event.start > end:
            gaps.append(Gap((event.start - end) / 1e3, (end - first.start) / 1e3, last.name, event.name))
        reached = event.start + event.duration
        if reached > end:
            busy += reached - max(end, event.start)
            last, end = event, reached
    gaps.sort(reverse=True)
    return Idle(device, (end - first.start) / 1e3, busy / 1e3, gaps[:largest])


def lines(idle: Idle) -> Iterator[str]:
    """For people."""
    yield f"{idle.device}: nothing ran in {idle.fraction:.1%} of {idle.span_us / 1e3:.3f} ms"
    for gap in idle.gaps:
        yield f"  {gap.us:9.2f} us at {gap.at_us / 1e3:9.3f} ms, after {gap.after[:60]}, before {gap.before[:60]}"
