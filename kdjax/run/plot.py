"""Plots that can be told apart in print: colours safe for the colour-blind, and a marker and a dash per line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdjax.errors import KdjaxError
from kdjax.output import writing
from kdjax.run.statistics import Estimate

STYLES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#000000", "v", "-"),
    ("#56B4E9", "P", "--"),
    ("#E69F00", "X", "-."),
)
"""Okabe & Ito's palette with markers and dashes."""

SIZE, DPI = (9.0, 4.2), 140


def require() -> None:
    """Raises KdjaxError where matplotlib is missing; worth asking before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise KdjaxError(
            'plots need matplotlib: pip install "kdjax[plots]", or leave them out by --no-plots'
        ) from error


def new_figure() -> Any:
    """An empty matplotlib figure of `SIZE` inches, without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=SIZE, layout="constrained")


def save(figure: Any, path: Path) -> None:
    """On white whatever the viewer's background; replaces a file of that name at once."""
    part = path.with_suffix(".part")
    with writing(path):
        figure.savefig(part, dpi=DPI, format="png", facecolor="white", metadata={"Software": None})
        part.replace(path)


def line(axes: Any, x: Sequence[Any], estimates: Sequence[Estimate], style: int, label: str | None = None) -> None:
    """A line through the values, with bars for their intervals."""
    color, marker, dashes = STYLES[style % len(STYLES)]
    values = [e.value for e in estimates]
    axes.errorbar(x, values, _spread(estimates), color=color, marker=marker, linestyle=dashes, capsize=3, label=label)


def log_x(axes: Any, values: Sequence[int]) -> None:
    """A logarithmic x axis with a tick at each of the values, but where two would overlap."""
    ticks: list[int] = []
    for value in sorted(set(values)):
        if not ticks or value >= 1.3 * ticks[-1]:
            ticks.append(value)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
    axes.minorticks_off()


def bars(axes: Any, labels: Sequence[str], estimates: Sequence[Estimate], style: int = 0) -> None:
    """Horizontal bars, the first on top, each with its label, if any, its value and interval."""
    places = range(len(labels))
    values = [e.value for e in estimates]
    axes.barh(places, values, xerr=_spread(estimates), color=STYLES[style % len(STYLES)][0], alpha=0.7, capsize=3)
    said = [f"{label}: {value:.3g}" if label else f"{value:.3g}" for label, value in zip(labels, values, strict=True)]
    axes.set_yticks(places, said)
    axes.invert_yaxis()


def _spread(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Distances from the values down and up to the ends of their intervals, as matplotlib takes them."""
    low = [0.0 if e.low is None else max(e.value - e.low, 0.0) for e in estimates]
    high = [0.0 if e.high is None else max(e.high - e.value, 0.0) for e in estimates]
    return [low, high]
