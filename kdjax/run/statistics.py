"""Figures over units (prompts, repetitions) with bootstrap confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

RESAMPLES = 4000
CONFIDENCE = 0.95


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a cell: the sum of field `total` over its records, per sum of field `per`; without `per` the mean.

    `per` makes a micro average, in which units weigh by their size. Records that lack a field are left out. Fields are
    looked for in a record and in its `timings`. `definition` is what a reader has to know.
    """

    total: str
    per: str | None = None
    definition: str = ""


class Estimate(NamedTuple):
    """A figure over `n` units; `low` and `high` bound its 95 % interval, None below two units."""

    value: float
    low: float | None
    high: float | None
    n: int


class Difference(NamedTuple):
    """`change` is B's figure over A's, less one; None where A's is zero. `paired`: over units that both have."""

    a: float
    b: float
    difference: float
    low: float | None
    high: float | None
    change: float | None
    n: int
    paired: bool

    @property
    def is_significant(self) -> bool:
        """Whether the 95 % interval leaves out zero."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def estimate(metric: Metric, records: Sequence[Mapping[str, Any]], seed: int = 0) -> Estimate | None:
    """None where no record has the fields. Percentile bootstrap over the records' units."""
    units = _units(metric, records)
    if not units:
        return None
    sums = np.array(list(units.values()))
    low, high = _interval(_resampled(sums, seed)) if len(sums) > 1 else (None, None)
    return Estimate(_ratio(sums), low, high, len(sums))


def difference(
    metric: Metric, a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], seed: int = 0
) -> Difference | None:
    """B less A. Units of the same name are resampled together, so that what they have in common cancels."""
    of_a, of_b = _units(metric, a), _units(metric, b)
    if not of_a or not of_b:
        return None
    common = [unit for unit in of_a if unit in of_b]
    paired = bool(common)
    left = np.array([of_a[u] for u in common] if paired else list(of_a.values()))
    right = np.array([of_b[u] for u in common] if paired else list(of_b.values()))
    samples = _resampled(right, seed) - _resampled(left, seed if paired else seed + 1)
    one, other = _ratio(left), _ratio(right)
    enough = min(len(left), len(right)) > 1
    low, high = _interval(samples) if enough else (None, None)
    change = other / one - 1 if one else None
    return Difference(one, other, other - one, low, high, change, min(len(left), len(right)), paired)


def field(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name, record.get("timings", {}).get(name))
    return None if value is None else float(value)


def _units(metric: Metric, records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Numerator and denominator of each unit; records of one unit are added up."""
    units: dict[str, tuple[float, float]] = {}
    for i, record in enumerate(records):
        total = field(record, metric.total)
        per = 1.0 if metric.per is None else field(record, metric.per)
        if total is not None and per is not None:
            unit = str(record.get("unit", i))
            before = units.get(unit, (0.0, 0.0))
            units[unit] = (before[0] + total, before[1] + per)
    return units


def _ratio(sums: np.ndarray) -> float:
    total, per = sums.sum(0)
    return float(total / per) if per else 0.0


def _resampled(sums: np.ndarray, seed: int) -> np.ndarray:
    chosen = np.random.default_rng(seed).integers(len(sums), size=(RESAMPLES, len(sums)))
    total, per = sums[chosen].sum(1).T
    return np.divide(total, per, out=np.zeros_like(total), where=per != 0)


def _interval(samples: np.ndarray) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)
