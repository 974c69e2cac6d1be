"""Figures and intervals against what is known about them."""

import numpy as np
import pytest

from kdjax.run.statistics import Metric, difference, estimate, mcnemar, wilson

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
    part = difference(MEAN, a, b[:20] + [{"tau": 1e6, "unit": "other"}])
    assert part is not None and part == difference(MEAN, a[:20], b[:20]) and part.paired and part.n == 20
    few = difference(MEAN, a, [{"tau": 1.0, "unit": "other"}])
    assert few is not None and (few.n, few.low, few.is_significant) == (1, None, False)


def test_a_base_makes_a_perplexity_of_a_ratio():
    records = [{"bits": 8.0, "bytes": 4}, {"bits": 4.0, "bytes": 8}]
    found = estimate(Metric(total="bits", per="bytes", base=2.0), records)
    assert found is not None and found.value == 2.0 and found.low == 2**0.5 and found.high == 4.0
    gap = difference(Metric(total="bits", per="bytes", base=2.0), records[:1], records[1:])
    assert gap is not None and gap.difference == 2**0.5 - 4


def test_quantiles_are_of_the_values_of_all_units():
    values = np.random.default_rng(1).exponential(size=900)
    records = [{"unit": f"u{i}", "kl": part.tolist()} for i, part in enumerate(np.split(values, 30))]
    tail, most = (estimate(Metric(total="kl", quantile=q), records) for q in (0.99, 1.0))
    assert tail is not None and tail.value == np.sort(values)[890] and tail.n == 30
    assert tail.low is not None and tail.high is not None and tail.low < tail.value <= tail.high
    assert most is not None and (most.value, most.low, most.high) == (values.max(), None, None)
    rng, resampled = np.random.default_rng(0), []
    for draw in rng.integers(30, size=(4000, 30)):
        pooled = np.concatenate([records[i]["kl"] for i in draw])
        resampled.append(np.quantile(pooled, 0.99, method="inverted_cdf"))
    assert (tail.low, tail.high) == tuple(np.quantile(resampled, [0.025, 0.975]))


def test_intervals_of_shares_are_wilsons():
    # Agresti and Coull 1998, table of intervals: 0 of 10 and 5 of 10
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    right = Metric(total="right", share=True)
    found = estimate(right, [{"unit": str(i), "right": 0} for i in range(10)])
    assert found is not None and (found.value, found.low, found.high) == (0.0, *wilson(0, 10))
    for bad in ([{"unit": "a", "right": 2}], [{"unit": "a", "right": 1}, {"unit": "a", "right": 0}]):
        with pytest.raises(ValueError, match="right: a share needs one record per unit"):
            estimate(right, bad)


@pytest.mark.parametrize(
    "only_a, only_b, p", [(0, 0, 1), (1, 0, 1), (5, 0, 0.0625), (6, 0, 0.03125), (10, 2, 79 / 2048), (7, 7, 1)]
)
def test_mcnemar_is_the_exact_binomial_test(only_a, only_b, p):
    assert mcnemar(only_a, only_b) == mcnemar(only_b, only_a) == pytest.approx(p, rel=1e-12)


def test_paired_shares_are_tested_by_who_is_right_alone():
    right = Metric(total="right", share=True)
    a = [{"unit": str(i), "right": int(i < 10)} for i in range(40)]
    b = [{"unit": str(i), "right": int(i < 16)} for i in range(40)]
    found = difference(right, a, b)
    assert found is not None and found.p == 2 / 2**6 and found.is_significant and found.difference == 0.4 - 0.25
    one_less = difference(right, a, b[:15] + [b[15] | {"right": 0}] + b[16:])
    assert one_less is not None and one_less.p == 2 / 2**5 and not one_less.is_significant
    unpaired = difference(right, a, [r | {"unit": "b" + r["unit"]} for r in b])
    assert unpaired is not None and unpaired.p is None
