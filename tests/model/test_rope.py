"""RoPE and YaRN of the target and of the drafter, against transformers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kdjax.config import YarnConfig
from kdjax.model import rope
from tests.tolerances import COS_SIN, INVERSE_FREQUENCY, ROTATED, cos_sin_own_frequencies

CASES = ["rope_target_k26", "rope_target_tiny", "rope_drafter_k26", "rope_drafter_amplitude_knob"]


def setup(o):
    p = dict(o.meta["parameters"])
    theta = p.pop("rope_theta")
    if "mscale" not in p:  # the config without mscale keys: amplitude m(1)
        p["attention_factor"] = o.meta["cos_sin_amplitude"]
    fields = {k: p[k] for k in YarnConfig.__struct_fields__ if p.get(k) is not None}
    return o.meta["dim"], theta, YarnConfig(**fields)


@pytest.mark.parametrize("case", CASES)
def test_inverse_frequencies_range_and_amplitude(oracle, case):
    o = oracle(case)
    dim, theta, yarn = setup(o)
    inv_freq = rope.inverse_frequencies(dim, theta, yarn)
    INVERSE_FREQUENCY.check(inv_freq, o.expected["inv_freq"])
    np.testing.assert_allclose(inv_freq, o.expected["inv_freq_float64"], rtol=6e-8)
    assert list(rope.correction_range(dim, theta, yarn)) == o.meta["correction_range"]
    np.testing.assert_allclose(rope.amplitude(yarn), o.meta["cos_sin_amplitude"], rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_rotation_at_positions_up_to_the_end_of_the_context(oracle, case):
    """Positions 0, 4095, 4096, 100k and 262143 are among those of the K2.6 cases."""
    o = oracle(case)
    _, _, yarn = setup(o)
    positions = jnp.asarray(o.inputs["positions"], jnp.int32)
    cos, sin = rope.cos_sin(positions, o.expected["inv_freq"], rope.amplitude(yarn))
    COS_SIN.check(cos, o.expected["cos"])
    COS_SIN.check(sin, o.expected["sin"])
    x = jnp.asarray(o.inputs["x"])
    if o.meta["kind"] == "target":
        ROTATED.check(rope.rotate_interleaved(x, cos, sin), o.expected["rotated_interleaved"])
    else:
        (name,) = [k for k in o.expected if k.startswith("rotated")]
        ROTATED.check(rope.rotate_half_split(x, cos, sin), o.expected[name])


@pytest.mark.parametrize("case", CASES)
def test_cos_sin_with_own_frequencies(oracle, case):
    o = oracle(case)
    dim, theta, yarn = setup(o)
    inv_freq = rope.inverse_frequencies(dim, theta, yarn)
    cos, _ = rope.cos_sin(jnp.asarray(o.inputs["positions"], jnp.int32), inv_freq, rope.amplitude(yarn))
    allowed = cos_sin_own_frequencies(o.inputs["positions"].astype(np.float64), inv_freq)
    assert (np.abs(np.asarray(cos) - o.expected["cos"]) <= allowed).all()


def test_k26_softmax_scale(oracle):
    o = oracle("rope_target_k26")
    _, _, yarn = setup(o)
    np.testing.assert_allclose(rope.mla_softmax_scale(192, yarn), o.meta["softmax_scale"], rtol=1e-7)
    np.testing.assert_allclose(rope.mla_softmax_scale(192, yarn), 0.144679626, rtol=1e-7)


def test_batch_rows_rotate_independently(oracle):
    o = oracle("rope_target_k26")
    dim, theta, yarn = setup(o)
    inv_freq = rope.inverse_frequencies(dim, theta, yarn)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 3, dim)), jnp.float32)
    row1 = jnp.asarray([7, 4096, 100_000], jnp.int32)

    def rotate(row0):
        positions = jnp.stack([jnp.asarray(row0, jnp.int32), row1])
        return rope.rotate_interleaved(x, *rope.cos_sin(positions, inv_freq, 1.0))

    a, b = rotate([0, 1, 2]), rotate([900, 3, 50_000])
    np.testing.assert_array_equal(a[1], b[1])
    assert np.abs(np.asarray(a[0] - b[0])).max() > 0.1
