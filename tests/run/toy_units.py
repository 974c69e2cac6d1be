"""The toy as an evaluation: each unit by itself, in an order that depends on which are missing."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.run.toy import CLAIM as CLAIM
from tests.run.toy import METRICS as METRICS
from tests.run.toy import Config as Config
from tests.run.toy import conclude as conclude
from tests.run.toy import draw as draw
from tests.run.toy import inputs as inputs

measured: list[tuple[int, str]] = []
FAILS_AT = "u0"


def units(config: Config) -> list[str]:
    return [f"u{i}" for i in range(config.units)]


def measure(config: Config, units: Sequence[str]) -> Iterator[dict[str, Any]]:
    for unit in reversed(units):
        time.sleep(config.pause)
        if config.fails and unit == FAILS_AT:
            raise RuntimeError("as asked for")
        measured.append((config.x, unit))
        i = int(unit[1:])
        y = config.x**2 + i + config.shift
        yield {"unit": unit, "y": y, "weight": i + 1, "pair": (i, i), "timings": {"s": time.perf_counter()}}
