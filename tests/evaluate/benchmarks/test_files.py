import gzip
import json

import pytest

from kdjax.errors import KdjaxError
from kdjax.evaluate.benchmarks import gsm8k, hellaswag, humaneval, math500, mbpp, mmlu, truthfulqa
from kdjax.evaluate.benchmarks.files import read_items
from tests.evaluate.benchmarks.samples import MINIATURES, sample

GSM8K = gsm8k.Gsm8k.kinds


@pytest.mark.parametrize(
    "file, task, count",
    [
        ("gsm8k", gsm8k.Gsm8k, 3),
        ("math500", math500.Math500, 3),
        ("humaneval", humaneval.HumanEval, 2),
        ("mbpp", mbpp.Mbpp, 2),
        ("mbpp_sanitized", mbpp.Mbpp, 1),
        ("mmlu", mmlu.Mmlu, 3),
        ("hellaswag", hellaswag.HellaSwag, 2),
        ("truthfulqa", truthfulqa.TruthfulQA, 2),
    ],
)
def test_miniatures(file, task, count):
    items = read_items(MINIATURES / f"{file}.jsonl", task.kinds)
    assert len({item.name(i) for i, item in enumerate(items)}) == count


@pytest.mark.parametrize(
    "file, task, count, first",
    [
        ("HumanEval.jsonl.gz", humaneval.HumanEval, 164, "HumanEval/0"),
        ("gsm8k-100.jsonl.gz", gsm8k.Gsm8k, 100, "gsm8k-test-0013"),
        ("hellaswag-100.jsonl.gz", hellaswag.HellaSwag, 100, "hellaswag-val-00106"),
        ("truthfulqa_mc1-100.jsonl.gz", truthfulqa.TruthfulQA, 100, "truthfulqa-mc1-val-0006"),
    ],
)
def test_samples(file, task, count, first):
    items = read_items(sample(file), task.kinds)
    assert len(items) == count and items[0].name(0) == first


def test_gzip_and_blank_lines(tmp_path):
    lines = (MINIATURES / "gsm8k.jsonl").read_text()
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(("\n" + lines + "\n\n").encode()))
    assert read_items(tmp_path / "x.jsonl.gz", GSM8K) == read_items(MINIATURES / "gsm8k.jsonl", GSM8K)


LINE = {"question": "1+1?", "answer": "2\n#### 2"}


@pytest.mark.parametrize(
    "line, error",
    [
        ({"question": "1+1?"}, r"line 2: no key 'answer': each line needs question, answer or id, prompt"),
        (LINE | {"answer": 2}, r"line 2: Expected `str`, got `int` - at `answer`"),
        (LINE | {"answer": "2"}, r"line 2: answer does not end with"),
        ([LINE], "line 2: list instead of an object"),
        ("{", "line 2: str instead"),
    ],
)
def test_lines_that_do_not_fit_are_named(tmp_path, line, error):
    file = tmp_path / "x.jsonl"
    file.write_text(f"{json.dumps(LINE)}\n{json.dumps(line)}\n")
    with pytest.raises(KdjaxError, match=f"x.jsonl, {error}") as caught:
        read_items(file, GSM8K)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, data, error",
    [
        ("x.jsonl", b"", "is empty"),
        ("x.jsonl", b"{", "line 1: .*write one JSON object a line"),
        ("x.jsonl", b'{"a": "\xff"}', "line 1: .*write one JSON object a line"),
        ("x.jsonl.gz", b"{}", "not a gzip file"),
        ("x.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-9], "not a gzip file"),
        ("x.jsonl", None, "prompt.shots_path = .*: cannot read it"),
    ],
)
def test_unusable_files(tmp_path, name, data, error):
    file = tmp_path / name
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(KdjaxError, match=error) as caught:
        read_items(file, GSM8K, "prompt.shots_path")
    assert "\n" not in str(caught.value)
