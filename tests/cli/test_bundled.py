"""The model that ships inside the package, and what the README promises about it."""

import json
import pathlib
import re

from kdjax.bundled import bundled_model
from kdjax.checkpoint import read_drafter_config, read_model_config
from kdjax.cli import main
from kdjax.config import ModelPair, load
from kdjax.tokenizer import Tokenizer
from kdjax.tokenizer.chat import ChatTemplate

ROOT = pathlib.Path(__file__).parents[2]
NANO = bundled_model("nano")


def test_files_stay_within_sixteen_megabytes():
    assert sum(file.stat().st_size for file in NANO.rglob("*") if file.is_file()) <= 16_000_000


def test_shapes_are_those_of_the_model_config():
    pair = load(ModelPair, ROOT / "configs" / "models" / "nano.toml")
    assert read_model_config(NANO / "target") == pair.target and read_drafter_config(NANO / "drafter") == pair.drafter


def test_template_is_the_one_of_the_package_and_reserved_ids_are_in_the_vocabulary():
    tokenizer = Tokenizer.from_checkpoint(NANO / "target")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert tokenizer.template.render(messages) == ChatTemplate.default().render(messages)
    assert tokenizer.vocab_size == 4096 and tokenizer.prompt_prefix == (tokenizer.eos_id,)


def test_default_command_writes_the_same_text_in_every_mode_and_drafts_are_accepted(cache, capsys, monkeypatch):
    monkeypatch.setenv("KDJAX_CACHE_DIR", str(cache))
    assert main(["generate", "--json", "--compare", "-n", "48", "def fibonacci(n):"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["identical"] is True and "return" in result["text"]
    assert result["tau_micro"] > 1.5 and result["acceptance_by_depth"][0] > 0.3


def test_python_example_of_the_readme_runs(cache, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(example, {})
    assert float(capsys.readouterr().out.split()[-1]) > 1


def test_readme_has_two_lines_for_a_fresh_machine():
    first = re.findall(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert first.splitlines() == ['pip install -e ".[test]" && kdjax generate "def fibonacci(n):"', "pytest"]
