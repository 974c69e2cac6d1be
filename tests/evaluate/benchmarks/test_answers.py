import pytest

from kdjax.evaluate.benchmarks import answers
from kdjax.evaluate.benchmarks.code import last_block, pass_at_k


@pytest.mark.parametrize(
    "text, thinking, kept",
    [
        ("the answer", False, "the answer"),
        ("2+2 is 4</think>4", True, "4"),
        ("2+2 is", True, None),
        ("", True, None),
        ("</think>", True, ""),
        ("a</think>b</think>c", True, "c"),
        ("a</think>b<think>c", True, None),
        ("a</think>b<think>c</think>d", True, "d"),
        ("<think>a</think>b", False, "b"),
        ("<think>a", False, None),
        ("a</think>b", False, "a</think>b"),
    ],
)
def test_thinking_is_stripped_or_unfinished(text, thinking, kept):
    assert answers.without_thinking(text, thinking=thinking) == kept


@pytest.mark.parametrize(
    "text, content",
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ \{1, 2\} }", r" \{1, 2\} "),
        (r"\boxed{\text{a }\}}", r"\text{a }\}"),
        (r"\boxed{1} but \boxed{\frac{1}{2}", "1"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed {4}", "4"),
        (r"\fbox{6}", "6"),
        (r"\boxed{}", ""),
        (r"\boxed5", None),
        ("5", None),
    ],
)
def test_last_box(text, content):
    assert answers.last_boxed(text) == content


@pytest.mark.parametrize(
    "text, number",
    [
        ("It costs $1,234.50.", "1234.50"),
        ("He has 5 left.", "5"),
        ("first 3, then 4", "4"),
        ("the range 3-5", "5"),
        ("x = -7", "-7"),
        ("minus (-7)", "-7"),
        ("$-3", "-3"),
        ("-$3", "-3"),
        ("so .5 of it", ".5"),
        ("about 70%...", "70"),
        ("Answer: 18\n#### 18\n\n...", "18"),
        ("item3", "3"),
        ("none at all...", None),
        ("1,000,000 stars", "1000000"),
        (r"\$20", "20"),
        ("version 1.2.3", "3"),
    ],
)
def test_last_number(text, number):
    assert answers.last_number(text) == number


@pytest.mark.parametrize(
    "text, number",
    [
        ("#### 18", "18"),
        ("#### 17\nno\n#### 18", "18"),
        ("#### -1,250.", "-1250"),
        ("####18", None),
        ("#### $18", None),
        ("18", None),
    ],
)
def test_marked_number(text, number):
    assert answers.marked_number(text) == number


@pytest.mark.parametrize(
    "text, block",
    [
        ("Sure:\n```python\ndef f():\n    pass\n```\nDone.", "def f():\n    pass\n"),
        ("```\na\n```\n```py\nb\n```", "b\n"),
        ("```python\ndef f(): pass\n```\nUse it:\n```python\nf()\n```", "def f(): pass\n"),
        ("```python\ndef f(): pass\n", "def f(): pass\n"),
        ("def f(): pass", None),
        ("a ``` b", None),
    ],
)
def test_last_block(text, block):
    assert last_block(text, "def f") == block


@pytest.mark.parametrize(
    "n, c, k, expected", [(1, 1, 1, 1.0), (1, 0, 1, 0.0), (10, 3, 1, 0.3), (5, 2, 3, 1 - 1 / 10), (5, 3, 3, 1.0)]
)
def test_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_share_of_lucky_draws():
    import itertools

    draws = list(itertools.combinations([1, 1, 0, 0, 0, 0, 0], 3))
    assert pass_at_k(7, 2, 3) == pytest.approx(sum(any(draw) for draw in draws) / len(draws), abs=1e-12)


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_refuses(k):
    with pytest.raises(ValueError, match="must lie in 1 to the 3 samples"):
        pass_at_k(3, 1, k)
