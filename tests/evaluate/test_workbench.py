"""Prompts of experiments and evaluations: what is read and what is refused; and that the bundled ones are usable."""

import collections

import pytest

from kdjax.errors import KdjaxError
from kdjax.evaluate import documents
from kdjax.evaluate.workbench import PromptsSection

ONE = '{"id": "a", "domain": "python", "text": "import json"}\n'


@pytest.fixture
def prompts(tmp_path):
    def read(text, **section):
        file = tmp_path / "prompts.jsonl"
        file.write_text(text)
        return documents.read(PromptsSection(file=str(file), **section), "prompts")

    return read


def test_prompts_are_taken_in_order(prompts):
    lines = "".join(ONE.replace('"a"', f'"{name}"') for name in "abcd")
    assert [p.id for p in prompts(lines)] == ["a", "b", "c", "d"]
    assert [p.id for p in prompts(lines, count=2)] == ["a", "b"]
    assert [p.id for p in prompts(lines, skip=1, count=2)] == ["b", "c"]
    assert [p.id for p in prompts(lines, skip=3)] == ["d"]


@pytest.mark.parametrize(
    "text, section, said",
    [
        (ONE + "{", {}, "line 2: .*write id, domain and text as one JSON object"),
        ('{"id": "a", "text": "b"}', {}, "line 1: .*missing required field `domain`"),
        ('{"id": "a", "domain": "c", "text": "b", "more": 1}', {}, "line 1: .*unknown field `more`"),
        (ONE + ONE, {}, "line 2: the id 'a' is there already"),
        (ONE, {"count": 2}, "has 1 prompts, prompts.skip = 0 and count = 2"),
        (ONE, {"skip": 1}, "has 1 prompts, prompts.skip = 1 and count = None"),
        ("", {}, "has 0 prompts"),
    ],
)
def test_bad_prompts_are_named(prompts, text, section, said):
    with pytest.raises(KdjaxError, match=said) as caught:
        prompts(text, **section)
    assert "\n" not in str(caught.value)


def test_missing_prompt_files_are_named():
    with pytest.raises(KdjaxError, match="no such file: give JSON lines or bundled:NAME"):
        documents.file_of(PromptsSection(file="nowhere.jsonl"), "prompts")
    with pytest.raises(KdjaxError, match=r"did you mean mixed\?"):
        documents.file_of(PromptsSection(file="bundled:mixd"), "prompts")


def test_bundled_prompts_mix_the_domains_from_the_first_on():
    found = documents.read(PromptsSection(), "prompts")
    assert len(found) == 24 and len({p.text for p in found}) == 24
    assert collections.Counter(p.domain for p in found[:4]) == {"python": 2, "docs": 1, "prose": 1}
