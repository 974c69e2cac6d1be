"""Figures and intervals against what is known about them."""

import numpy as np
import pytest

from kdjax.run.statistics import Metric, difference, estimate

RATIO = Metric(total="emitted", per="rounds")
MEAN = Metric(total="tau")


def test_micro_average_weighs_by_size_and_macro_does_not():
    records = [{"emitted": 8, "rounds": 2, "tau": 4.0}, {"emitted": 8, "rounds": 8, "tau": 1.0}, {"rounds": 5}]
    micro, macro = estimate(RATIO, records), estimate(MEAN, records)
    assert micro is not None and macro is not None
    assert (micro.value, micro.n, macro.value, macro.n) == (1.6, 2, 2.5, 2)


def test_timings_are_looked_into_and_units_added_up():
    records = [{"unit": "u", "emitted": 1, "timings": {"rounds": 2}}, {"unit": "u", "emitted": 3, "rounds": 2}]
    found = estimate(RATIO, records)
    assert found is not None and (found.value, found.low, found.high, found.n) == (1.0, None, None, 1)
    assert estimate(Metric(total="absent"), records) is None


def test_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        found = estimate(MEAN, [{"tau": x} for x in rng.normal(5, 2, size=40)])
        assert found is not None and found.low is not None and found.high is not None
        covered += found.low <= 5 <= found.high
    assert 178 <= covered <= 198  # 95 % of 200, which a percentile bootstrap of 40 falls a little short of


def test_pairing_removes_what_units_have_in_common():
    rng = np.random.default_rng(0)
    base = rng.normal(0, 10, size=30)
    a = [{"unit": str(i), "tau": x} for i, x in enumerate(base)]
    b = [{"unit": str(i), "tau": x + 1 + 0.1 * rng.normal()} for i, x in enumerate(base)]
    paired = difference(MEAN, a, b)
    unpaired = difference(MEAN, a, [{"tau": r["tau"], "unit": "other" + r["unit"]} for r in b])
    assert paired is not None and unpaired is not None
    assert paired.paired and paired.is_significant and paired.difference == pytest.approx(1, abs=0.1)
    assert not unpaired.paired and not unpaired.is_significant
