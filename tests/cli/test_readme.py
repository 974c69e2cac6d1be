"""What the README promises: its two lines, its Python examples, and text from the bundled model."""

import json
import pathlib
import re

from kdjax.cli import main

ROOT = pathlib.Path(__file__).parents[2]


def test_default_command_writes_the_same_text_in_every_mode_and_drafts_are_accepted(cache, capsys, monkeypatch):
    monkeypatch.setenv("KDJAX_CACHE_DIR", str(cache))
    assert main(["generate", "--json", "--compare", "-n", "48", "def fibonacci(n):"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["identical"] is True and "return" in result["text"]
    assert result["tau_micro"] > 1.5 and result["acceptance_by_depth"][0] > 0.3


def test_python_examples_of_the_readme_run_one_after_the_other(cache, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    decoder, engine = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(decoder, names)
    text, tau = capsys.readouterr().out.rsplit(maxsplit=1)
    assert float(tau) > 1
    exec(engine, names)
    assert capsys.readouterr().out.startswith(text)


def test_speed_ups_of_the_readme_are_those_that_were_measured():
    readme, card = (
        " ".join((ROOT / "README.md").read_text().split()),
        (ROOT / "kdjax/bundled/nano/README.md").read_text(),
    )
    for row, said in (
        ("50 of all 13 Python domains", "with the bundled model {} on two CPU cores"),
        ("4 of scikit-learn, the least", "single domains {}, scikit-learn"),
        ("4 of the standard library", "to {}, the standard library"),
    ):
        [measured] = re.findall(rf"^\| {row} \|.* (\S+x) \|$", card, re.M)
        assert said.format(measured) in readme
    h200 = json.loads((ROOT / "docs/results/generate_h200.json").read_text())
    rate = {mode: one["decode_tokens_per_s"] for mode, one in h200["modes"].items()}
    assert f"and {rate['tree'] / rate['autoregressive']:.2f}x on an H200" in readme
    trees = h200["exactness"]["cells"]["mode=tree"]["identical"]
    parted = round((1 - trees["value"]) * trees["n"])
    assert f"with trees {parted} of {trees['n']} texts parted from plain decoding on an H200" in readme


def test_readme_has_two_lines_for_a_fresh_machine():
    first = re.findall(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert first.splitlines() == ['pip install -e ".[plots,test]" && kdjax generate "def fibonacci(n):"', "pytest"]
