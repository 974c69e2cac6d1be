import pytest

from kdjax.evaluate.benchmarks import generation, parity
from kdjax.run.experiment import result

METRICS = generation.METRICS


def records(rights, outputs=None, prompt="p"):
    return [
        {
            "unit": f"u{i}",
            "prompt_sha256": prompt,
            "correct": right,
            "truncated": 0.0,
            "samples": [{"output": (outputs or {}).get(i, "x"), "finish_reason": "length" if i == 0 else "stop"}],
            "rounds": 2,
            "emitted": 4,
            "tau": 2.0,
        }
        for i, right in enumerate(rights)
    ]


def cell(name, *args, **kwargs):
    return result(name, None, records(*args, **kwargs), METRICS)


def test_a_cell_says_its_figures():
    [said] = parity.conclude([cell("tree", [1, 0, 0, 0])])
    assert said == "tree: 4 questions, accuracy 25.0% (4.6% to 69.9%), truncated 0.0%, 1 of 4 outputs cut at new_tokens"


def test_pairs_of_cells():
    many = [1, 0] * 10
    *_, ar_chain, ar_tree, chain_tree = parity.conclude(
        [cell("ar", many), cell("chain", many), cell("tree", [0, 1, 1, 1, 1] + many[5:], {0: "y", 1: "y", 3: "y"})]
    )
    assert ar_chain.startswith("chain against ar: identical answers to 20 of 20 questions, accuracy +0.0 points")
    assert "0 gained and 0 lost (McNemar p = 1)" in ar_chain
    assert "identical answers to 17 of 20" in ar_tree and "2 gained and 1 lost (McNemar p = 1)" in ar_tree
    assert "accuracy +5.0 points" in chain_tree


def test_mcnemar_is_two_sided_and_exact():
    a, b = cell("a", [0] * 8), cell("b", [1] * 7 + [0])
    assert "7 gained and 0 lost (McNemar p = 0.0156)" in parity.conclude([a, b])[-1]


@pytest.mark.parametrize("other", [cell("b", [1, 0], prompt="q"), cell("b", [1])])
def test_cells_of_other_prompts_are_not_compared(other):
    assert len(parity.conclude([cell("a", [1, 0]), other])) == 2


def test_another_end_is_another_answer():
    a, b = records([1]), records([1])
    b[0]["samples"][0]["finish_reason"] = "stop"
    found = parity.conclude([result(name, None, r, METRICS) for name, r in (("a", a), ("b", b))])
    assert "identical answers to 0 of 1" in found[-1]
