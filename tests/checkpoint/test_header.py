"""The header parser on arbitrary bytes: it returns what the safetensors library does, or refuses."""

import json

import numpy as np
import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from kdjax.checkpoint.header import BadHeader, header_length, parse_header
from kdjax.checkpoint.layout import DTYPES


def cases(count: int):
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


NAMES = st.sampled_from(["a", "b", "model.norm.weight", "__metadata__", "", "é\n"]) | st.text(max_size=6)
INTEGERS = st.sampled_from([0, 1, 2, 3, 4, 8, 2**31, 2**63, 2**64 - 1, -1]) | st.integers()
LEAVES = st.none() | st.booleans() | INTEGERS | st.floats() | st.text(max_size=4)
JUNK = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "I4", "f32"]) | JUNK,
        "shape": st.lists(st.integers(0, 4), max_size=3) | JUNK,
        "data_offsets": st.lists(st.integers(0, 64), min_size=2, max_size=2) | JUNK,
        "extra": JUNK,
    },
)
HEADERS = st.dictionaries(NAMES, ENTRIES | JUNK, max_size=4)


def parse(raw: bytes):
    """A whole file -> its entries."""
    length = header_length(raw[:8], len(raw))
    return parse_header(raw[8 : 8 + length], len(raw))


def check(raw: bytes) -> None:
    """Either refused with one printable line, or everything that a reader relies on holds."""
    try:
        entries = parse(raw)
    except BadHeader as error:
        assert str(error).isprintable() and 0 < len(str(error)) < 1000
        return
    end = 8 + int.from_bytes(raw[:8], "little")
    for entry in entries.values():
        assert entry.start == end <= entry.stop <= len(raw)
        assert np.prod(entry.shape, dtype=object) * DTYPES[entry.dtype].itemsize == entry.stop - entry.start
        end = entry.stop
    assert end == len(raw)
    theirs = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in safetensors.deserialize(raw)}
    assert {name: (entry.dtype, entry.shape) for name, entry in entries.items()} == theirs


@cases(500)
@given(HEADERS, st.integers(0, 64))
def test_made_up_headers(header, data):
    text = json.dumps(header).encode()
    check(len(text).to_bytes(8, "little") + text + bytes(data))


SOUND = save(
    {
        "model.norm.weight": np.arange(3, dtype=np.float32),
        "packed": np.arange(8, dtype=np.int32).reshape(2, 4),
        "empty": np.zeros((0, 4), np.float16),
        "scalar": np.array(7, np.int64),
    },
    {"format": "pt"},
)


def test_a_sound_file_is_read_as_it_was_written():
    entries = parse(SOUND)
    assert {name: (entry.dtype, entry.shape) for name, entry in entries.items()} == {
        "model.norm.weight": ("F32", (3,)),
        "packed": ("I32", (2, 4)),
        "empty": ("F16", (0, 4)),
        "scalar": ("I64", ()),
    }
    packed = entries["packed"]
    np.testing.assert_array_equal(np.frombuffer(SOUND[packed.start : packed.stop], np.int32), np.arange(8))


EDITS = st.lists(
    st.tuples(st.integers(0, len(SOUND)), st.integers(0, 12), st.binary(max_size=8)), min_size=1, max_size=3
)


@cases(1000)
@given(EDITS)
def test_damaged_bytes(edits):
    """Bytes of a sound file replaced, removed or inserted, mostly in its header."""
    raw = SOUND
    for at, removed, inserted in edits:
        raw = raw[:at] + inserted + raw[at + removed :]
    check(raw)


@cases(600)
@given(st.integers(0, len(SOUND) - 1), st.sampled_from(b'{}[]":,0123456789-.eE\\truefalsn \x00\xff'))
def test_one_byte_of_the_header(at, byte):
    check(SOUND[:at] + bytes([byte]) + SOUND[at + 1 :])


@cases(400)
@given(st.binary(max_size=40))
@example(b"")
@example(b"\x02\0\0\0\0\0\0\0{}")
@example(b"\xff" * 8)
def test_noise(raw):
    check(raw)


def test_every_truncation_is_refused():
    for size in range(len(SOUND)):
        with pytest.raises(BadHeader, match=r"^is (truncated, \d+ bytes (are missing|of)|empty)"):
            parse(SOUND[:size])
