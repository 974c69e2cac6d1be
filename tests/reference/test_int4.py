import ml_dtypes
import numpy as np
import pytest

from kdjax.reference import int4
from tests import tolerances


def test_codes_pack_as_compressed_tensors_does(oracle):
    case = oracle("pack_codes")
    for name, codes in case.inputs.items():
        packed = case.expected[name.replace("codes", "packed")]
        np.testing.assert_array_equal(int4.pack(codes), packed, name)
        np.testing.assert_array_equal(int4.unpack(packed, codes.shape[1]), codes, name)


def test_a_word_written_by_hand():
    """Nibbles are value + 8 and the lowest one is column 0."""
    codes = np.array([[-8, -7, -1, 0, 1, 2, 6, 7]], np.int8)
    word = np.array([[0xFEA98710]], np.uint32).view(np.int32)
    np.testing.assert_array_equal(int4.pack(codes), word)
    np.testing.assert_array_equal(int4.unpack(word, 8), codes)


def test_scale_edges_dequantise_bit_for_bit(oracle):
    case = oracle("pack_scale_edges")
    packed, scale = case.inputs["weight_packed"], case.inputs["weight_scale"]
    columns = case.inputs["codes"].shape[1]
    for rounding, name in (("bfloat16", "weight_bf16"), ("float32", "weight_f32")):
        ours = int4.dequantise(packed, scale, columns, rounding=rounding)
        np.testing.assert_array_equal(ours, case.expected[name].astype(np.float64), name)


@pytest.mark.parametrize(("rule", "largest_code"), [("lib7.5", 7.5), ("max7", 7.0)])
def test_quantiser_matches_the_library(oracle, rule, largest_code):
    case = oracle("pack_quantize")
    weight = case.inputs["weight_bf16"]
    codes, scale = int4.quantise(weight, largest_code=largest_code)
    expected_scale = case.expected[f"{rule}.weight_scale"]
    used = np.abs(weight.reshape(*scale.shape, 32)).max(-1) > 0  # the scale of an all-zero group is a convention
    assert 0 < (~used).sum() < used.sum()
    np.testing.assert_array_equal(scale[used].view(np.uint16), expected_scale[used].view(np.uint16))
    np.testing.assert_array_equal(codes, case.expected[f"{rule}.codes"])
    np.testing.assert_array_equal(int4.pack(codes), case.expected[f"{rule}.weight_packed"])
    back = int4.dequantise(int4.pack(codes), expected_scale, weight.shape[1])
    np.testing.assert_array_equal(back, case.expected[f"{rule}.dequant_bf16"].astype(np.float64))


def test_legal_slices_dequantise_to_the_slice_of_the_whole(oracle):
    case = oracle("pack_tp_slices")
    for cut in (cut for cut in case.meta["slices"] if cut["legal"]):
        name, axis = cut["matrix"], {"out": 0, "in": 1}[cut["axis"]]
        columns = int(case.inputs[f"{name}.weight_shape"][1])
        whole = int4.dequantise(case.inputs[f"{name}.weight_packed"], case.inputs[f"{name}.weight_scale"], columns)
        ranks = [f"{name}.{cut['axis']}.tp{cut['tp']}.rank{r}" for r in range(cut["tp"])]
        parts = [
            int4.dequantise(
                case.expected[f"{rank}.weight_packed"],
                case.expected[f"{rank}.weight_scale"],
                columns if axis == 0 else columns // cut["tp"],
            )
            for rank in ranks
        ]
        np.testing.assert_array_equal(np.concatenate(parts, axis), whole, str(cut))


def test_every_group_gets_its_own_scale(oracle):
    case = oracle("pack_group_boundary")
    packed, scale, x = (case.inputs[k] for k in ("weight_packed", "weight_scale", "x"))
    weight = int4.dequantise(packed, scale, x.shape[1])
    np.testing.assert_array_equal(weight, case.expected["weight_bf16"].astype(np.float64))
    tolerances.PACKED_MATMUL.check(x @ weight.T, case.expected["y"])


def test_a_zero_group_quantises_to_zero():
    codes, scale = int4.quantise(np.zeros((1, 32), ml_dtypes.bfloat16))
    assert not codes.any() and np.isfinite(scale.astype(np.float32)).all() and (scale > 0).all()
