"""Figures over units (prompts, repetitions) with confidence intervals, and tests of their differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike

RESAMPLES = 4000
CONFIDENCE = 0.95


class Metric(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A figure of a cell: the sum of field `total` over its records, per sum of field `per`; without `per` the mean.

    `per` makes a micro average, in which units weigh by their size. Records that lack a field are left out. Fields are
    looked for in a record and in its `timings`. `definition` is what a reader has to know.

    `base`: the figure is that number to the power of the sum per sum; perplexity, for instance, is 2 ** (bits / bytes).
    `quantile`: `total` holds a list of values, and the figure is that quantile of the values of all records.
    `share`: every unit is right (1) or wrong (0). The interval is then Wilson's, which tells 0 of 5 from 0 of 500, and
    two cells are compared by McNemar's exact test.
    """

    total: str
    per: str | None = None
    base: float | None = None
    quantile: Annotated[float, Meta(gt=0, le=1)] | None = None
    share: bool = False
    definition: str = ""


class Estimate(NamedTuple):
    """A figure over `n` units; `low` and `high` bound its 95 % interval, None below two units."""

    value: float
    low: float | None
    high: float | None
    n: int


class Difference(NamedTuple):
    """`change` is B's figure over A's, less one; None where A's is zero. `paired`: over units that both have.

    `p`: of McNemar's exact test, for shares over paired units; None otherwise.
    """

    a: float
    b: float
    difference: float
    low: float | None
    high: float | None
    change: float | None
    n: int
    paired: bool
    p: float | None = None

    @property
    def is_significant(self) -> bool:
        """Whether p is below 5 %; where there is none, whether the 95 % interval leaves out zero."""
        if self.p is not None:
            return self.p < 1 - CONFIDENCE
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def estimate(metric: Metric, records: Sequence[Mapping[str, Any]], seed: int = 0) -> Estimate | None:
    """None where no record has the fields. Percentile bootstrap over the records' units; of shares Wilson's."""
    units = list(_units(metric, records).values())
    if not units:
        return None
    value, n = _value(metric, units), len(units)
    if metric.share:
        return Estimate(value, *wilson(round(value * n), n), n)
    low, high = (None, None) if n < 2 or metric.quantile == 1 else _interval(_resampled(metric, units, seed))
    return Estimate(value, low, high, n)


def difference(
    metric: Metric, a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], seed: int = 0
) -> Difference | None:
    """B less A. Units of the same name are resampled together, so that what they have in common cancels."""
    of_a, of_b = _units(metric, a), _units(metric, b)
    if not of_a or not of_b:
        return None
    common = [unit for unit in of_a if unit in of_b]
    paired = bool(common)
    left = [of_a[u] for u in common] if paired else list(of_a.values())
    right = [of_b[u] for u in common] if paired else list(of_b.values())
    one, other, n = _value(metric, left), _value(metric, right), min(len(left), len(right))
    low, high = None, None
    if n > 1 and metric.quantile != 1:
        low, high = _interval(_resampled(metric, right, seed) - _resampled(metric, left, seed if paired else seed + 1))
    p = None
    if metric.share and paired:
        rights = [(mine[0] > 0, theirs[0] > 0) for mine, theirs in zip(left, right, strict=True)]
        p = mcnemar(rights.count((True, False)), rights.count((False, True)))
    change = other / one - 1 if one else None
    return Difference(one, other, other - one, low, high, change, n, paired, p)


def wilson(hits: int, n: int) -> tuple[float, float]:
    """The 95 % score interval of a share of `n` independent units (Wilson 1927)."""
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share = hits / n
    centre, scale = share + z * z / (2 * n), 1 + z * z / n
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max((centre - spread) / scale, 0.0), min((centre + spread) / scale, 1.0)


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided p of McNemar's exact test: units that only one of two settings got right fall on either side alike."""
    n = only_a + only_b
    below, ways = 0, 1
    for k in range(min(only_a, only_b) + 1):
        below += ways
        ways = ways * (n - k) // (k + 1)
    return min(2 * below / 2**n, 1.0)


def field(record: Mapping[str, Any], name: str) -> float | None:
    """A number of a record or of its `timings`; None where it is in neither."""
    value = record.get(name, record.get("timings", {}).get(name))
    return None if value is None else float(value)


def _units(metric: Metric, records: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Of each unit its values, or its numerator and denominator; records of one unit are added up."""
    units: dict[str, np.ndarray] = {}
    for i, record in enumerate(records):
        unit = str(record.get("unit", i))
        if metric.quantile is not None:
            if metric.total in record:
                units[unit] = np.append(units.get(unit, []), record[metric.total])
            continue
        total = field(record, metric.total)
        per = 1.0 if metric.per is None else field(record, metric.per)
        if total is not None and per is not None:
            units[unit] = units.get(unit, np.zeros(2)) + (total, per)
    if metric.share and any(total not in (0, 1) or per != 1 for total, per in units.values()):
        raise ValueError(f"{metric.total}: a share needs one record per unit, which is 0 or 1")
    return units


def _value(metric: Metric, units: Sequence[np.ndarray]) -> float:
    if metric.quantile is not None:
        return float(np.quantile(np.concatenate(units), metric.quantile, method="inverted_cdf"))
    return float(_ratio(metric, *np.sum(units, axis=0)))


def _ratio(metric: Metric, total: ArrayLike, per: ArrayLike) -> np.ndarray:
    total, per = np.asarray(total, np.float64), np.asarray(per, np.float64)
    ratio = np.divide(total, per, out=np.zeros_like(total), where=per != 0)
    return np.asarray(ratio if metric.base is None else metric.base**ratio)


def _resampled(metric: Metric, units: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """The figure over as many units, drawn with replacement, again and again."""
    chosen = np.random.default_rng(seed).integers(len(units), size=(RESAMPLES, len(units)))
    if metric.quantile is None:
        return _ratio(metric, *np.asarray(units)[chosen].sum(1).T)
    values = np.concatenate(units)
    order = np.argsort(values)
    owner = np.repeat(np.arange(len(units)), [len(unit) for unit in units])[order]
    found = []
    for draw in chosen:
        weights = np.cumsum(np.bincount(draw, minlength=len(units))[owner])
        found.append(values[order[np.searchsorted(weights, metric.quantile * weights[-1])]])
    return np.asarray(found)


def _interval(samples: np.ndarray) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)
