"""Agreement of two runs: the figures against their definitions, and what does and does not change them."""

import math

import msgspec
import numpy as np
import pytest

from kdjax.config.generate import ModelSection
from kdjax.config.mesh import MeshConfig
from kdjax.errors import KdjaxError
from kdjax.evaluate import agreement
from kdjax.evaluate.agreement import Config, Side, compare, divergence
from kdjax.evaluate.documents import TextsSection
from kdjax.run.experiment import result
from tests.cli.conftest import tiny as tiny
from tests.tolerances import FLOAT32_KL

RNG = np.random.default_rng(0)
ONE = RNG.normal(0, 3, (5, 11))
OTHER = ONE + RNG.normal(0, 1, ONE.shape)


def test_divergence_is_that_of_the_definition():
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (ONE, OTHER))
    np.testing.assert_allclose(divergence(ONE, OTHER), (p * np.log(p / q)).sum(1), rtol=1e-12)


def test_divergence_of_twins_is_zero_and_of_near_twins_is_resolved():
    assert not divergence(ONE, ONE).any()
    near = ONE.copy()
    near[:, 0] += 1e-9
    p = np.exp(ONE[:, 0]) / np.exp(ONE).sum(1)
    np.testing.assert_allclose(divergence(ONE, near), p * (1 - p) * 1e-18 / 2, rtol=1e-4)


def test_divergence_ignores_a_shift_and_takes_float32_as_it_is():
    shifted = OTHER.astype(np.float32)
    exact = divergence(ONE, shifted.astype(np.float64) + 7)
    np.testing.assert_allclose(divergence(ONE, shifted), exact, rtol=1e-12)


def test_margins_are_kept_where_the_first_choices_differ():
    reference = np.array([[3.0, 1.0, 0.0], [2.0, 1.5, 0.0]])
    test = np.array([[4.0, 1.0, 0.0], [1.0, 1.25, 0.0]])
    record = compare(reference, test)
    assert (record["tokens"], record["same"], record["margins"]) == (2, 1, [2.0, 0.5])
    assert record["partings"] == [{"row": 1, "tokens": [0, 1], "margins": [0.5, 0.25]}]
    assert record["kl_sum"] == sum(record["kl"]) and len(record["kl"]) == 2


def test_the_reference_leaves_nothing_to_the_device():
    assert Side(engine="numpy").left_open == []
    assert Side(compute_dtype="float32").left_open == ["cache_dtype", "backend", "expert_weights", "layout"]


def config(tiny, **sides):
    texts = TextsSection(count=1)
    return Config(model=ModelSection(target=str(tiny / "target")), texts=texts, window=24, pieces=2, **sides)


def figures(config):
    records = list(agreement.measure(config, agreement.units(config)))
    return {name: found.value for name, found in result("", config, records, agreement.METRICS).estimates.items()}


FLOAT32 = {"compute_dtype": "float32", "cache_dtype": "float32"}


@pytest.mark.parametrize(
    "test",
    [
        Side(**FLOAT32, expert_weights="dequantized"),
        Side(**FLOAT32, expert_weights="dequantized", backend="interpret"),
        Side(**FLOAT32, expert_weights="packed", mesh=MeshConfig(expert=2)),
    ],
    ids=["fused", "kernels", "mesh"],
)
def test_float32_in_any_form_agrees_with_the_reference(tiny, test):
    found = figures(config(tiny, test=test))
    assert found["top1"] == 1 and 0 < found["kl_mean"] <= found["kl_p99"] <= found["kl_max"] < FLOAT32_KL


def test_bfloat16_is_farther_away(tiny):
    float32, bfloat16 = Side(**FLOAT32), Side(compute_dtype="bfloat16", cache_dtype="bfloat16")
    found = figures(config(tiny, reference=float32, test=bfloat16))
    assert 10 * FLOAT32_KL < found["kl_mean"] < 0.1
    assert set(figures(config(tiny, reference=float32, test=float32)).values()) == {0.0, 1.0}


def test_another_checkpoint_can_be_the_test(tiny, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    for file in (tiny / "target").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = msgspec.json.decode((folder / "config.json").read_bytes())
    text = settings.get("text_config", settings)
    text["routed_scaling_factor"] *= 1.5
    (folder / "config.json").write_bytes(msgspec.json.encode(settings))
    side = Side(engine="numpy", target=str(folder))
    assert figures(config(tiny, test=side))["kl_mean"] > 1e-6


def test_pieces_cover_the_text_once(tiny):
    whole = msgspec.structs.replace(config(tiny), pieces=None)
    pieces = agreement._pieces(whole)
    assert list(pieces)[:2] == ["python/tree:0", "python/tree:1"] == agreement.units(config(tiny))
    assert all(piece.tokens[0] == list(pieces.values())[0].tokens[0] for piece in pieces.values())
    ids = [token for piece in pieces.values() for token in piece.tokens[1:]]
    one = agreement._pieces(msgspec.structs.replace(whole, window=10_000))
    assert ids == one["python/tree:0"].tokens[1:] and math.ceil(len(ids) / 23) == len(pieces)


def test_a_missing_text_is_named(tiny):
    with pytest.raises(KdjaxError, match=r"texts.file = 'bundled:heldoit': .*did you mean heldout\?"):
        agreement.inputs(msgspec.structs.replace(config(tiny), texts=TextsSection(file="bundled:heldoit")))
