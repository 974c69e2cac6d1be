"""An experiment that needs no model: what it measures follows from its config, its timings from the clock."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kdjax.run.experiment import Inputs, Result
from kdjax.run.statistics import Metric

CLAIM = "a parabola"
METRICS = {
    "height": Metric(total="y", definition="x squared, mean over units"),
    "rate": Metric(total="y", per="weight"),
    "seconds": Metric(total="s"),
}


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    x: int = 1
    units: int = 3
    fails: bool = False
    shift: float = 0.0
    pause: float = 0.0


def inputs(config: Config) -> Inputs:
    return Inputs()


def measure(config: Config) -> Iterator[dict[str, Any]]:
    for i in range(config.units):
        time.sleep(config.pause)
        yield {
            "unit": f"u{i}",
            "y": config.x**2 + i + config.shift,
            "weight": i + 1,
            "text": "a\u2028b",
            "timings": {"s": time.perf_counter()},
        }
    if config.fails:
        raise RuntimeError("as asked\nfor")


def conclude(results: Sequence[Result]) -> list[str]:
    return [f"{results[-1].name} is {results[-1].value('height'):g} high"]


def draw(results: Sequence[Result], figure: Any) -> None:
    figure.subplots().plot([r.value("height") for r in results])
