"""Plots that can be told apart in print: colours safe for the colour-blind, and a marker and a dash per line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdjax.errors import KdjaxError
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
    from matplotlib.figure import Figure

    return Figure(figsize=SIZE, layout="constrained")


def save(figure: Any, path: Path) -> None:
    """On white whatever the viewer's background; replaces a file of that name at once."""
    part = path.with_suffix(".part")
    figure.savefig(part, dpi=DPI, format="png", facecolor="white", metadata={"Software": None})
    part.replace(path)


def line(axes: Any, x: Sequence[Any], estimates: Sequence[Estimate], style: int, label: str | None = None) -> None:
    """A line through the values, with bars for their intervals."""
    color, marker, dashes = STYLES[style % len(STYLES)]
    values = [e.value for e in estimates]
    low = [e.value - (e.value if e.low is None else e.low) for e in estimates]
    high = [(e.value if e.high is None else e.high) - e.value for e in estimates]
    spread = [[max(v, 0.0) for v in side] for side in (low, high)]
    axes.errorbar(x, values, spread, color=color, marker=marker, linestyle=dashes, capsize=3, label=label)


def bars(axes: Any, labels: Sequence[str], estimates: Sequence[Estimate], style: int = 0) -> None:
    """Horizontal bars, the first on top, each with its value."""
    places = range(len(labels))
    values = [e.value for e in estimates]
    axes.barh(places, values, color=STYLES[style % len(STYLES)][0], alpha=0.85)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    for place, value in zip(places, values, strict=True):
        axes.text(value, place, f" {value:.3g}", va="center", fontsize=9)
    axes.margins(x=0.15)
