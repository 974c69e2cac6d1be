"""What the cells of cost-aware policies measure, on a random model."""

import msgspec
import pytest

from experiments import ablations
from kdjax.decode import CostAware
from kdjax.run.experiment import Result
from tests.cli.conftest import tiny as tiny


@pytest.fixture
def config(tiny):
    values = {
        "model": {"target": str(tiny / "target"), "drafter": str(tiny / "drafter")},
        "policy": "batch",
        "decode": {"mode": "tree", "budget": 3},
        "widths": [1, 3],
        "prompts": {"count": 2, "new_tokens": 6},
        "calibrate": {"skip": 2, "count": 2, "new_tokens": 6},
    }
    return msgspec.convert(values, ablations.Config)


@pytest.fixture
def decoded(monkeypatch):
    """The policies of the decoders that decoded, in turn."""
    found = []
    decode_all = ablations.decode_all

    def listed(decoder, requests):
        found.append(decoder.program.policy)
        return decode_all(decoder, requests)

    monkeypatch.setattr(ablations, "decode_all", listed)
    monkeypatch.setattr(ablations, "costs", lambda config: ((1, 3), (1.0, 1.1)))
    return found


@pytest.mark.parametrize("tried, keeps", [(0.9, 3), (1.1, None)])
def test_a_policy_whose_choice_costs_more_than_it_gains_keeps_to_its_widest_budget(
    config, decoded, monkeypatch, tried, keeps
):
    monkeypatch.setattr(ablations, "gain", lambda config, policy: tried)
    records = list(ablations.measure(config))
    assert records[0]["timings"] == {"seconds": [1.0, 1.1], "gain": tried, "keeps": keeps}
    aware = [policy for policy in decoded if policy is not None]
    assert aware == ([] if keeps else [CostAware((1, 3), (1.0, 1.1), "batch")])
    own = {r["unit"]: r["timings"]["decode_s"] for r in records if "timed_tokens" in r}
    widest = {r["unit"]: r["timings"]["fixed_s"] for r in records if r.get("fixed") == 3}
    assert (own == widest) == bool(keeps) and own.keys() == widest.keys()
    said = ablations.conclude([Result("cell", config, records, {})])
    assert any("0.90 times" in line and "keeps to 3 nodes" in line for line in said) == bool(keeps)
    assert not any("runs +0.0% against the best fixed budget (3 nodes), outside" in line for line in said)


def test_gain_compares_with_the_fastest_fixed_budget(config, decoded, monkeypatch):
    monkeypatch.setattr(ablations, "_seconds", lambda decoder, groups: (0.0, 2.0 if decoder.program.policy else 3.0))
    assert ablations.gain.__wrapped__(config, "batch") == 1.5
