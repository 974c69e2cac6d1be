import numpy as np
import pytest

from kdjax.config import YarnConfig
from kdjax.reference import rope
from tests import oracles, tolerances


@pytest.fixture(params=oracles.ROPE)
def case(request, oracle):
    return oracle(request.param)


def yarn_of(case):
    theta, parameters = oracles.yarn_parameters(case)
    return theta, YarnConfig(**parameters)


def test_frequencies_and_amplitude_match_transformers(case):
    theta, yarn = yarn_of(case)
    dim = case.meta["dim"]
    assert list(rope.correction_range(dim, theta, yarn)) == case.meta["correction_range"]
    assert rope.amplitude(yarn) == pytest.approx(case.meta["cos_sin_amplitude"], rel=1e-12)
    ours = rope.inverse_frequencies(dim, theta, yarn)
    tolerances.INVERSE_FREQUENCY.check(ours, case.expected["inv_freq"])
    np.testing.assert_allclose(ours, case.expected["inv_freq_float64"], rtol=1e-13)


def test_angles_and_rotation_match_transformers(case):
    theta, yarn = yarn_of(case)
    positions, x = case.inputs["positions"], case.inputs["x"]
    cos, sin = rope.cos_sin(positions, case.meta["dim"], theta, yarn)
    allowed = tolerances.cos_sin_own_frequencies(positions, case.expected["inv_freq"])
    assert (np.abs(cos - case.expected["cos"]) <= allowed).all()
    assert (np.abs(sin - case.expected["sin"]) <= allowed).all()

    given = case.expected["cos"], case.expected["sin"]
    if case.meta["kind"] == "target":
        rotated = rope.rotate_interleaved(x, *given)
        tolerances.ROTATED.check(rotated, case.expected["rotated_interleaved"])
        hf_layout = np.concatenate([rotated[:, 0::2], rotated[:, 1::2]], -1)
        tolerances.ROTATED.check(hf_layout, case.expected["rotated_hf_layout"])
    else:
        tolerances.ROTATED.check(rope.rotate_half_split(x, *given), case.expected["rotated_half_split"])


def test_k26_drafter_rope_keeps_relative_angles_beyond_its_training_context(oracle):
    """Scores depend on the distance of query and key alone, at 5k and 20k as at 100."""
    theta, yarn = yarn_of(oracle("rope_drafter_k26"))
    q, k = np.random.default_rng(0).standard_normal((2, 1, 128))

    def score(position):
        rotated = [
            rope.rotate_half_split(x, *rope.cos_sin(np.array([p]), 128, theta, yarn))
            for x, p in ((q, position), (k, position - 7))
        ]
        return float((rotated[0] * rotated[1]).sum())

    assert score(5_000) == pytest.approx(score(100), abs=5e-3)
    assert score(20_000) == pytest.approx(score(100), abs=2e-2)


def test_without_yarn_the_frequencies_are_the_plain_geometric_ones():
    np.testing.assert_allclose(rope.inverse_frequencies(8, 10000.0, None), [1.0, 0.1, 0.01, 0.001])
    assert rope.amplitude(None) == 1.0
