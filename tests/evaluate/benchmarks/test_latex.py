import pytest

from kdjax.errors import KdjaxError
from kdjax.evaluate.benchmarks import latex

SAME = [
    (r"\frac{1}{2}", r"\dfrac12"),
    (r"\frac{1}{2}", "1/2"),
    (r"-\frac{1}{2}", "-1/2"),
    (r"\frac{1}{72}", r"\tfrac1{72}"),
    (r"\frac{\pi}{2}", r"\frac{ \pi }{2}"),
    ("0.5", ".5"),
    ("5", "$5$."),
    ("5", r"x = 5"),
    ("5", r"5\text{ cm}"),
    ("5", r"5\,\mathrm{cm}^2"),
    ("90", r"90^\circ"),
    ("90", r"90^{\circ}"),
    ("10", r"10\%"),
    ("20", r"\$20"),
    ("12345", "12,345"),
    ("12345", "12{,}345"),
    (r"\sqrt{3}", r"\sqrt3"),
    (r"2\sqrt{3}", r"2\sqrt 3"),
    (r"(1,2)", r"\left( 1, 2 \right)"),
    (r"\text{Tuesday}", "Tuesday"),
    (r"\text{(B)}", "(B)"),
    (r"x \le 3", r"x\leq 3"),
    ("[1,5)", r"\left[1,5\right)"),
    (r"\{1,2\}", r"\lbrace 1, 2 \rbrace"),
]
DIFFERENT = [
    ("1,2", "12"),
    ("(1,2)", "(2,1)"),
    ("5", "-5"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    (r"\sqrt{3}", "3"),
    ("x+1", "x-1"),
    ("0.5", "5"),
    (r"\text{A}", r"\text{B}"),
    ("3", "33"),
    (r"x \le 3", r"x \ge 3"),
]


@pytest.mark.parametrize("one, other", SAME)
def test_same_value_same_form(one, other):
    assert latex.normal_form(one) == latex.normal_form(other)


@pytest.mark.parametrize("one, other", DIFFERENT)
def test_different_values_stay_apart(one, other):
    assert latex.normal_form(one) != latex.normal_form(other)


@pytest.mark.parametrize("text", [one for pair in SAME + DIFFERENT for one in pair])
def test_normal_form_is_a_fixed_point(text):
    form = latex.normal_form(text)
    assert form and latex.normal_form(form) == form


def test_verifier_has_to_be_there_where_it_is_named(monkeypatch):
    assert latex.verifier("none") is None
    monkeypatch.setattr(latex.util, "find_spec", lambda name: None)
    assert latex.verifier("auto") is None
    with pytest.raises(KdjaxError, match="not installed"):
        latex.verifier("math-verify")


@pytest.mark.parametrize(
    "answer, expected, same",
    [
        (r"\frac{2}{4}", r"\frac{1}{2}", True),
        ("0.5", r"\frac{1}{2}", True),
        ("x(x+1)", "x^2+x", True),
        ("x^2", "x^3", False),
        ("}{", "5", False),
    ],
)
def test_what_math_verify_decides(answer, expected, same):
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    assert latex.normal_form(answer) != latex.normal_form(expected)
    assert latex.is_equivalent(answer, expected) == same
