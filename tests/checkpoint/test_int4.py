"""Packing and quantising against compressed-tensors, and by hand."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdjax.checkpoint import int4
from kdjax.errors import KdjaxError
from kdjax.model.int4 import dequantize


def test_one_word_by_hand():
    codes = np.array([[-8, -7, -1, 0, 1, 2, 6, 7]], np.int8)
    assert int4.pack(codes).view(np.uint32)[0, 0] == 0xFEA98710
    np.testing.assert_array_equal(int4.unpack(np.array([[0xFEA98710]], np.uint32).view(np.int32), 8), codes)


def test_unused_nibbles_of_the_last_word_are_zero():
    codes = np.array([[1, 2, 3, 4, 5, 6, 7, -8, -1, -2, -3]], np.int8)
    np.testing.assert_array_equal(int4.pack(codes).view(np.uint32), [[0x0FEDCBA9, 0x00000567]])


def test_packing_equals_compressed_tensors(oracle):
    case = oracle("pack_codes")
    for name, codes in case.inputs.items():
        words = case.expected[name.replace("codes", "packed")]
        np.testing.assert_array_equal(int4.pack(codes), words)
        np.testing.assert_array_equal(int4.unpack(words, codes.shape[1]), codes)


@given(st.integers(1, 4), st.integers(1, 21), st.integers(0, 2**31))
def test_unpack_inverts_pack(rows, columns, seed):
    codes = np.random.default_rng(seed).integers(-8, 8, (2, rows, columns), np.int8)
    np.testing.assert_array_equal(int4.unpack(int4.pack(codes), columns), codes)


@pytest.mark.parametrize("rule, name", [("max/7.5", "lib7.5"), ("max/7", "max7")])
def test_quantiser_equals_compressed_tensors(oracle, rule, name):
    case = oracle("pack_quantize")
    weight = case.inputs["weight_bf16"]
    codes, scale = int4.quantize(weight, 32, rule)
    # The scale of an all-zero group is arbitrary.
    used = codes.reshape(*scale.shape, 32).any(axis=-1)
    assert 0 < (~used).sum() < 3
    np.testing.assert_array_equal(scale[used], case.expected[f"{name}.weight_scale"][used])
    np.testing.assert_array_equal(codes, case.expected[f"{name}.codes"])
    wide, _ = int4.quantize(weight.astype(np.float32), 32, rule)
    np.testing.assert_array_equal(wide, case.expected[f"{name}.codes_f32_division"])
    assert (wide != codes).any(), "the case no longer tells the two divisions apart"
    encoded = int4.encode(weight, 32, rule)
    np.testing.assert_array_equal(np.asarray(encoded.packed).view(np.int32), case.expected[f"{name}.weight_packed"])
    values = np.asarray(dequantize(encoded, np.dtype(ml_dtypes.bfloat16)))
    np.testing.assert_array_equal(values, case.expected[f"{name}.dequant_bf16"])


def test_halves_round_to_even():
    weight = np.array([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5]], np.float32)
    codes, scale = int4.quantize(weight, 8, "max/7")
    assert scale == 1
    np.testing.assert_array_equal(codes, [[7, 0, 2, 2, 0, -2, -2, 4]])


def test_max7_never_uses_minus_eight_and_quantising_is_idempotent():
    weight = np.random.default_rng(0).normal(size=(3, 16, 96)).astype(np.float32)
    first = int4.encode(weight, 32, "max/7")
    assert int4.unpack(np.asarray(first.packed).view(np.int32), 96).min() == -7
    values = np.asarray(dequantize(first, np.dtype(np.float32)))
    assert np.abs(values - weight).max() <= 0.51 * np.asarray(first.scale).astype(np.float32).max()


def test_every_group_gets_its_own_scale_back():
    base = np.tile(np.arange(-7, 9, dtype=np.float32).clip(-7, 7), (4, 2 * 5))
    groups = np.repeat(np.float32(2.0) ** np.arange(5), 32)
    row = np.float32(2.0) ** (8 * np.arange(4))[:, None]
    encoded = int4.encode(base * groups * row, 32, "max/7")
    np.testing.assert_array_equal(np.asarray(encoded.scale).astype(np.float32), row * 2.0 ** np.arange(5))
    np.testing.assert_array_equal(np.asarray(dequantize(encoded, np.dtype(np.float32))), base * groups * row)


def test_an_all_zero_group_stays_zero():
    codes, scale = int4.quantize(np.zeros((2, 32), np.float32), 32, "max/7")
    assert not codes.any() and (scale > 0).all()


def test_bad_weights_are_refused():
    with pytest.raises(KdjaxError, match="48 columns in groups of 32"):
        int4.quantize(np.zeros((2, 48), np.float32), 32, "max/7")
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(KdjaxError, match="NaN or infinite"):
            int4.quantize(np.full((2, 32), bad, np.float32), 32, "max/7")
