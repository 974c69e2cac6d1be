"""Prompts to the letter, and what counts as right."""

import msgspec
import pytest

from kdjax.errors import KdjaxError
from kdjax.evaluate.benchmarks import coding, generation, gsm8k, hellaswag, humaneval, math500, mbpp, mmlu, truthfulqa
from kdjax.evaluate.benchmarks.files import read_items
from kdjax.evaluate.benchmarks.sandbox import Limits
from tests.evaluate.benchmarks.samples import MINIATURES, sample

BASE, CHAT = (generation.PromptSection(style=style) for style in ("base", "chat"))
BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
LIMITS = Limits(wall_s=30, cpu_s=10, memory_mb=512)


def items(task, name):
    return read_items(MINIATURES / f"{name}.jsonl", task.kinds)


def test_gsm8k_prompts():
    task, (pencils, *_) = gsm8k.Gsm8k(), items(gsm8k.Gsm8k, "gsm8k")
    assert task.prompt(pencils, [], "chat") == (f"{pencils.question}\n{BOXED}", ())
    bricks = items(gsm8k.Gsm8k, "gsm8k_train")[:1]
    text, stops = task.prompt(pencils, bricks, "base")
    assert text == (
        "Question: Tom stacks 2 rows of 3 bricks. How many bricks does he stack?\n"
        "Answer: He stacks 2*3=<<2*3=6>>6 bricks.\n#### 6\n\n"
        f"Question: {pencils.question}\nAnswer:"
    )
    assert stops == ("Question:",) and task.shots == 5


@pytest.mark.parametrize(
    "prompt, text, correct, strict",
    [
        (BASE, " 36-6=30.\n#### 30", True, True),
        (BASE, " so 30 pencils.", True, False),
        (BASE, " #### 30\nbut 6 boxes", False, True),
        (BASE, " #### 31\n#### 30", True, True),
        (BASE, "", False, False),
        (CHAT, r"\boxed{30}", True, True),
        (CHAT, r"It is \boxed{30\text{ pencils}}.", True, False),
        (CHAT, r"\boxed{31}, no, \boxed{\$30.}", True, True),
        (CHAT, r"\boxed{31} and 30", False, False),
        (CHAT, "She has 30 left.", True, False),
        (CHAT, "30.5", False, False),
        (CHAT, r"\boxed{\frac{60}{2}}", False, False),
    ],
)
def test_gsm8k_grades(prompt, text, correct, strict):
    pencils = items(gsm8k.Gsm8k, "gsm8k")[0]
    graded = gsm8k.Gsm8k().grade(gsm8k.Config(prompt=prompt), pencils, text)
    assert (graded["correct"], graded["strict"], graded["expected"]) == (correct, strict, "30")


def test_gsm8k_commas_and_signs():
    _, pump, cellar = items(gsm8k.Gsm8k, "gsm8k")
    config, task = gsm8k.Config(prompt=CHAT), gsm8k.Gsm8k()
    assert task.grade(config, pump, r"\boxed{4,000}")["strict"] and task.grade(config, pump, "4000 litres")["correct"]
    assert task.grade(config, cellar, r"\boxed{-3}")["strict"] and not task.grade(config, cellar, "3")["correct"]


def test_math500_prompts_and_grades():
    task, (roots, fraction, interval) = math500.Math500(), items(math500.Math500, "math500")
    assert task.prompt(roots, [], "chat") == (f"{roots.problem}\n{BOXED}", ())
    text, stops = task.prompt(roots, [fraction], "base")
    assert stops == ("Problem:",) and text == (
        f"Problem:\n{fraction.problem}\n\nSolution: {fraction.solution}\n\nProblem:\n{roots.problem}\n\nSolution:"
    )
    config = math500.Config(verifier="none")
    for item, text, correct, strict in (
        (roots, r"\boxed{x = 5}", True, True),
        (roots, "so 5", True, False),
        (roots, r"\boxed{6} or 5", False, False),
        (fraction, r"\boxed{\dfrac38}", True, True),
        (fraction, r"\boxed{3/8}", True, True),
        (fraction, r"\boxed{0.375}", False, False),
        (interval, r"\boxed{\left[1, 5\right)}", True, True),
        (interval, r"\boxed{(1,5)}", False, False),
        (interval, "", False, False),
    ):
        graded = task.grade(config, item, text)
        assert (graded["correct"], graded["strict"]) == (correct, strict), text
        assert graded["graded_by"] == "normal form"


def test_math500_asks_math_verify_where_it_is_installed():
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    fraction = items(math500.Math500, "math500")[1]
    graded = math500.Math500().grade(math500.Config(), fraction, r"\boxed{0.375}")
    assert graded["correct"] and graded["graded_by"].startswith("math-verify ")


def test_humaneval_prompts():
    task, (gap, undouble) = humaneval.HumanEval(), items(humaneval.HumanEval, "humaneval")
    assert task.prompt(gap, [], "base") == (gap.prompt, ("\nclass", "\ndef", "\n#", "\nif", "\nprint"))
    assert task.prompt(undouble, [], "chat").text == (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{undouble.prompt}\n```\n"
    )


GAP = "def largest_gap(values):\n    s = sorted(values)\n    return max((b - a for a, b in zip(s, s[1:])), default=0)\n"
UNDOUBLE = "def undouble(text):\n    half = text[:len(text) // 2]\n    return half if double(half) == text else None\n"


@pytest.mark.parametrize(
    "style, number, text, correct",
    [
        ("base", 0, "    s = sorted(values)\n    return max((b - a for a, b in zip(s, s[1:])), default=0)\n", True),
        ("base", 0, "    return 5\n", False),
        ("base", 0, "", False),
        ("base", 0, "    import sys; sys.exit(0)\n", False),
        ("chat", 0, f"Here it is:\n```python\n{GAP}```\nUse it like this:\n```python\nlargest_gap([1])\n```", True),
        ("chat", 0, GAP, True),
        ("chat", 0, "```python\n    return 5\n```", False),
        ("chat", 1, f"```python\n{UNDOUBLE}```", True),  # with the helper of the prompt
        ("chat", 1, f"```python\nfrom __future__ import annotations\n{UNDOUBLE}", True),  # unclosed
        ("chat", 1, "I cannot.", False),
    ],
)
def test_humaneval_grades(style, number, text, correct):
    item = items(humaneval.HumanEval, "humaneval")[number]
    prompt = generation.PromptSection(style=style)
    config = coding.Config(allow_code_execution=True, prompt=prompt, sandbox=LIMITS)
    assert humaneval.HumanEval().grade(config, item, text)["correct"] == correct


def test_canonical_solutions_of_the_miniatures_pass():
    config = coding.Config(allow_code_execution=True, sandbox=LIMITS)
    for item in items(humaneval.HumanEval, "humaneval"):
        assert humaneval.HumanEval().grade(config, item, item.canonical_solution)["outcome"] == "passed"
    for name in ("mbpp", "mbpp_sanitized", "mbpp_train"):
        for item in items(mbpp.Mbpp, name):
            assert mbpp.Mbpp().grade(config, item, item.code)["outcome"] == "passed"


@pytest.mark.full
def test_canonical_solutions_of_humaneval_pass():
    config = coding.Config(allow_code_execution=True, sandbox=LIMITS)
    task = humaneval.HumanEval()
    problems = read_items(sample("HumanEval.jsonl.gz"), task.kinds)
    failed = {p.task_id for p in problems if not task.grade(config, p, p.canonical_solution)["correct"]}
    assert len(problems) == 164 and not failed
    empty = {p.task_id for p in problems if task.grade(config, p, "    pass\n")["correct"]}
    assert not empty


def test_mbpp_prompts_and_grades():
    task, (vowels, hypotenuse) = mbpp.Mbpp(), items(mbpp.Mbpp, "mbpp")
    assert task.prompt(vowels, [], "chat") == ("Write a function to count the vowels of a word.", ())
    text, stops = task.prompt(vowels, items(mbpp.Mbpp, "mbpp_train")[:1], "base")
    assert stops == ("[DONE]",) and task.shots == 3
    assert text == (
        "You are an expert Python programmer, and here is your task: Write a function to square a number. "
        "Your code should pass these tests:\n\nassert square(2) == 4\nassert square(-3) == 9\nassert square(0) == 0\n"
        "[BEGIN]\ndef square(x):\n    return x * x\n[DONE]\n\n"
        "You are an expert Python programmer, and here is your task: Write a function to count the vowels of a word. "
        "Your code should pass these tests:\n\nassert count_vowels('Audio') == 4\nassert count_vowels('rhythm') == 0\n"
        "assert count_vowels('') == 0\n[BEGIN]\n"
    )
    config = coding.Config(allow_code_execution=True, sandbox=LIMITS)
    right = "def hypotenuse(a, b):\n    return (a * a + b * b) ** 0.5"  # math comes from the setup code of the tests
    assert task.grade(config, hypotenuse, f"```python\n{right}\n```")["correct"]
    assert task.grade(config, hypotenuse, right)["correct"]
    assert task.grade(config, hypotenuse, right.replace("+", "-"))["outcome"] in ("wrong", "exception")


def test_code_is_not_run_unless_that_is_allowed():
    config = coding.Config()
    for task, name in ((humaneval.HumanEval(), "humaneval"), (mbpp.Mbpp(), "mbpp")):
        with pytest.raises(KdjaxError, match="allow_code_execution = false.*--set allow_code_execution=true"):
            task.ready(config)
        with pytest.raises(KdjaxError, match="allow_code_execution"):
            task.grade(config, items(type(task), name)[0], "")


def test_mmlu_prompt():
    task, (force, _, materials) = mmlu.Mmlu(), items(mmlu.Mmlu, "mmlu")
    dev = items(mmlu.Mmlu, "mmlu_dev")
    assert [shot.subject for shot in task.shots_for(materials, dev)] == ["prehistory"] * 5
    asked = task.ask(force, task.shots_for(force, dev)[:1])
    assert asked.context == (
        "The following are multiple choice questions (with answers) about high school physics.\n\n"
        "What is 2 metres in centimetres?\nA. 2\nB. 20\nC. 200\nD. 2000\nAnswer: C\n\n"
        "In which unit is force measured?\nA. newton\nB. joule\nC. watt\nD. pascal\nAnswer:"
    )
    assert asked.choices == [" A", " B", " C", " D"] and asked.right == 0 and task.ask(materials, []).right == 3


def test_hellaswag_and_truthfulqa_prompts():
    tea, tyre = items(hellaswag.HellaSwag, "hellaswag")
    asked = hellaswag.HellaSwag().ask(tyre, [tea])
    assert asked.context == (
        "Making tea: A woman fills a kettle and switches it on. she pours the hot water over the leaves.\n\n"
        "Fixing a bike:  How to fix a flat tyre. Take the wheel off. A man turns his bike over. he".replace(
            "  How", " How"
        )
    )
    assert asked.choices[2] == " sings to the nuts." and asked.right == 1
    for begun, said in (("she", "switches it on. She"), ("", "switches it on.")):
        published = msgspec.structs.replace(tea, ctx_a=tea.ctx.removesuffix(" she"), ctx_b=begun)
        assert hellaswag.HellaSwag().ask(published, []).context == f"Making tea: A woman fills a kettle and {said}"
    stone, _ = items(truthfulqa.TruthfulQA, "truthfulqa")
    asked = truthfulqa.TruthfulQA().ask(stone, [])
    assert asked.context == "Q: What happens to a stone that is dropped in water?\nA:"
    assert asked.choices[0] == " It usually sinks." and asked.right == 0


@pytest.mark.parametrize(
    "kind, settings, error",
    [
        (generation.PromptSection, {"thinking": True}, "thinking = true needs style = chat"),
        (generation.PromptSection, {"style": "chat", "shots": 2}, "shots = 2 needs style = base"),
        (generation.Config, {"samples": 3}, "samples = 3 at temperature 0 are all the same"),
        (generation.Config, {"k": 2}, "k = 2 exceeds samples = 1"),
    ],
)
def test_settings_that_make_no_sense(kind, settings, error):
    with pytest.raises(msgspec.ValidationError, match=error):
        msgspec.convert(settings, kind)
