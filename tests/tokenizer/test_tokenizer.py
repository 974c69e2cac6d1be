"""Against golden ids of Kimi's own rank file, where present, and against a small file of the same layout."""

import codecs
import json
import pathlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdjax.errors import KdjaxError
from kdjax.tokenizer import Tokenizer
from kdjax.tokenizer.pattern import MAX_CHARS, MAX_RUN, chunks
from tests.oracles import find

pytestmark = pytest.mark.newest
SMALL = pathlib.Path(__file__).parents[1] / "data" / "tiktoken_4096.model"


@pytest.fixture(scope="module")
def kimi() -> Tokenizer:
    return Tokenizer.from_file(find("tokenizer") / "tiktoken.model")


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer.from_file(SMALL)


def golden(name):
    return json.loads((find(name) / "expected.json").read_text())


@pytest.mark.parametrize("case", ["tokenizer_strings", "tokenizer_random"])
def test_ordinary_text_has_the_golden_ids_and_round_trips(kimi, case):
    for item in golden(case)["strings"]:
        assert kimi.encode(item["text"]) == item["ids"], item["text"]
        assert kimi.decode(item["ids"]) == item["text"]


def test_reserved_names_are_ids_only_when_asked_for(kimi):
    for item in golden("tokenizer_special")["strings"]:
        assert kimi.encode(item["text"], special=True) == item["ids_special_recognised"]
        assert kimi.encode(item["text"]) == item["ids_as_ordinary_text"]


def test_special_table_is_the_golden_one(kimi):
    table = json.loads((find("tokenizer") / "special_tokens.json").read_text())
    assert kimi.special_tokens == table["special_tokens"]
    assert kimi.base == table["ranks"] and kimi.vocab_size == 163840


def test_special_ids_are_not_renumbered(kimi):
    names = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_system|>", "<|im_middle|>"]
    assert [kimi.special_tokens[n] for n in names] == [163584, 163585, 163586, 163587, 163594, 163601]


def test_thinking_marks_round_trip(kimi):
    assert kimi.decode([163607]) == "</think>"
    text = "<think>why</think>because"
    ids = kimi.encode(text, special=True)
    assert (ids[0], ids.index(163607) > 0, kimi.decode(ids)) == (163606, True, text)


def test_only_end_of_turn_and_eos_stop(kimi, small):
    assert kimi.stop_token_ids == {163586, 163585} and 1 not in kimi.stop_token_ids
    assert small.stop_token_ids == {3841, 3842}


def test_small_file_has_the_same_layout(small):
    assert (small.base, small.vocab_size, small.unk_id, small.pad_id) == (3840, 4096, 4094, 4095)
    assert small.special_tokens["<|reserved_token_3845|>"] == 3845


@pytest.mark.parametrize("text", ["def f(x):\n    return x**2\n", "naïve 中文 🙂 <|im_end|>", "", "\r\n \t\n", "'S'll"])
def test_small_file_round_trips(small, text):
    ids = small.encode(text)
    assert small.decode(ids) == text and all(i < small.base for i in ids)


def test_streaming_holds_unfinished_characters_back(kimi):
    case = golden("tokenizer_stream_bytes")
    assert [kimi.token_bytes(i).hex() for i in case["ids"]] == case["token_bytes_hex"]
    stream = kimi.detokenizer()
    parts = [stream.push([i]) for i in case["ids"]]
    assert "".join(parts) == case["text"]
    assert parts[0] == "" and "�" not in "".join(parts)


def test_stream_drops_an_unfinished_tail_and_marks_broken_bytes(small):
    euro = [small._table.index(bytes([b])) for b in "€".encode()]
    stream = small.detokenizer()
    assert [stream.push([i]) for i in euro] == ["", "", "€"]
    assert small.detokenizer().push(euro[:2]) == ""
    assert small.detokenizer().push([euro[0], *small.encode("a")]) == "�a"


@given(st.lists(st.integers(0, 4095), max_size=40), st.data())
def test_a_stream_is_the_whole_text_however_it_is_cut(small, ids, data):
    """Random ids: characters cut by tokens, broken bytes, and reserved ids in their midst."""
    stream, parts, rest = small.detokenizer(), [], list(ids)
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        parts.append(stream.push(rest[:n]))
        rest = rest[n:]
    ordinary = b"".join(small.token_bytes(i) for i in ids if i < small.base)
    whole = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(ordinary)
    assert "".join(parts) == whole


@given(st.text())
def test_any_text_streams_token_by_token(small, text):
    stream = small.detokenizer()
    parts = [stream.push([i]) for i in small.encode(text)]
    assert "".join(parts) == text and all("�" not in part for part in parts if "�" not in text)


def test_stream_never_shows_a_reserved_token(small):
    ids = [small.bos_id, *small.encode("hi"), small.im_end_id, small.unk_id]
    assert small.detokenizer().push(ids) == "hi"


def test_long_inputs_are_cut_as_moonshot_cuts_them():
    run, spaces = "a" * (2 * MAX_RUN + 10), " " * (MAX_RUN + 1)
    assert [len(c) for c in chunks("x " + run)] == [MAX_RUN + 2, MAX_RUN, 10]
    assert [len(c) for c in chunks(run + spaces)] == [MAX_RUN, MAX_RUN, 10 + MAX_RUN, 1]
    assert [len(c) for c in chunks("ab " * MAX_CHARS)] == [MAX_CHARS] * 3
    assert list(chunks("short text")) == ["short text"]


def test_a_megabyte_of_one_character_is_encoded_in_seconds(small):
    start = time.process_time()
    text = "z" * 1_000_000
    assert small.decode(small.encode(text)) == text
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer must be fetched"),
        (b"YQ== 0\nYg== 2\n", "without gaps"),
        (b"YQ== 0\nYg== 1\n", "254 of the 256 single bytes"),
    ],
)
def test_broken_files_are_named(tmp_path, content, remedy):
    file = tmp_path / "tiktoken.model"
    file.write_bytes(content)
    with pytest.raises(KdjaxError, match=remedy) as caught:
        Tokenizer.from_file(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_and_foreign_id_are_errors(tmp_path, small):
    with pytest.raises(KdjaxError, match="cannot read the tokenizer file"):
        Tokenizer.from_checkpoint(tmp_path)
    with pytest.raises(KdjaxError, match="token 4096 is outside the vocabulary of 4096 ids"):
        small.decode([4096])
    with pytest.raises(KdjaxError, match="token -1 is outside"):
        small.token_bytes(-1)


def test_checkpoint_folder_brings_template_and_prompt_prefix(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(SMALL.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"add_bos_token": true, "bos_token": "[EOS]"}')
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hey"}])) == "hey!"
    assert tokenizer.encode_prompt("hey")[0] == tokenizer.eos_id
    config.write_text('{"add_bos_token": true, "bos_token": "<s>"}')
    with pytest.raises(KdjaxError, match="bos_token = '<s>' is not a reserved token"):
        Tokenizer.from_checkpoint(tmp_path)
    config.write_text("[1]")
    with pytest.raises(KdjaxError, match="expected an object, not list: download it again"):
        Tokenizer.from_checkpoint(tmp_path)
