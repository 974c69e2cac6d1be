"""`kdjax eval`: configs at their smoke size, on a random model; perplexity against its definition; what is refused."""

import importlib.util
import json
import pathlib
import tomllib

import numpy as np
import pytest

from kdjax import cli
from kdjax.cli.eval import find
from kdjax.config.generate import ModelSection
from kdjax.config.sweep import read_sweep
from kdjax.evaluate import EVALUATIONS, documents, perplexity
from kdjax.evaluate.divergence import Referee
from kdjax.evaluate.documents import TextsSection
from kdjax.run.experiment import Evaluation, result
from kdjax.tokenizer import Tokenizer
from tests.cli.conftest import cache as cache
from tests.cli.conftest import tiny as tiny

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "evals"
NAMED = {f.stem: tomllib.loads(f.read_text()) for f in sorted(CONFIGS.glob("*.toml"))}
PLOTS = importlib.util.find_spec("matplotlib") is not None


def test_every_evaluation_has_a_config_and_measures_by_units():
    assert {data["evaluation"] for data in NAMED.values()} == set(EVALUATIONS)
    assert all(isinstance(find(name), Evaluation) for name in EVALUATIONS)


@pytest.mark.parametrize("name", ["agreement", "exactness", "perplexity"])
def test_smoke(name, tiny, cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KDJAX_CACHE_DIR", str(cache))
    file = CONFIGS / f"{name}.toml"
    sweep = read_sweep(file, kind_of=lambda n: find(n).Config, key="evaluation", smoke=True)
    settings = [f"--set=model.target={tiny / 'target'}", f"--set=model.drafter={tiny / 'drafter'}"]
    settings += [] if PLOTS else ["--no-plots"]
    status = cli.main(["eval", str(file), "--smoke", "--out", str(tmp_path / "r"), *settings])
    out, err = capsys.readouterr()
    assert status == 0, err
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert list(summary["cells"]) == [cell.name for cell in sweep.cells] and not summary["failed"]
    assert all(finding in " ".join(out.split()) for finding in summary["findings"]) and summary["evaluation"] == name
    proof = json.loads((tmp_path / "r" / "provenance.json").read_text())
    assert len(next(iter(proof["files"].values()))["sha256"]) == 64
    section = "test" if name == "agreement" else "runtime"
    assert proof["settled"][f"{section}.backend"] == "xla" and f"{section}.layout" in proof["settled"]
    if PLOTS:
        assert (tmp_path / "r" / "plot.png").stat().st_size > 5000


def test_perplexity_is_that_of_the_reference(tiny, tmp_path):
    text = "A line,  of few\nwords.\n"
    (tmp_path / "own.txt").write_text(text)
    config = perplexity.Config(
        model=ModelSection(target=str(tiny / "target")), texts=TextsSection(file=str(tmp_path / "own.txt")), window=64
    )
    [record] = perplexity.measure(config, perplexity.units(config))
    tokenizer = Tokenizer.from_checkpoint(tiny / "target")
    sequence = [tokenizer.bos_id, *tokenizer.encode(text)]
    logits = Referee(tiny / "target").logits(sequence[:-1])
    log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    nats = -sum(log_p[i, token] for i, token in enumerate(sequence[1:]))
    assert record["bits"] == pytest.approx(nats / np.log(2), rel=1e-5)
    assert (record["unit"], record["bytes"], record["words"]) == ("own", 23, 6)  # the last word is empty, as in lm-eval
    found = result("all", config, [record], perplexity.METRICS)
    assert found.value("bits_per_byte") == pytest.approx(nats / np.log(2) / 23, rel=1e-5)
    assert found.value("byte_perplexity") == pytest.approx(np.exp(nats / 23), rel=1e-5)
    assert found.value("word_perplexity") == pytest.approx(np.exp(nats / 6), rel=1e-4)


def test_bundled_texts_are_of_several_domains_from_the_first_on():
    texts = documents.read(TextsSection(), "texts")
    assert len(texts) == 16 and {text.domain for text in texts[:4]} == {"python", "prose", "docs"}
    assert all(1000 < len(text.text.encode()) < 6000 for text in texts)


def test_a_text_file_has_to_be_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="not UTF-8 .*at byte 3"):
        documents.read(TextsSection(file=str(tmp_path / "a.txt")), "texts")


@pytest.mark.parametrize(
    "verb, text, said",
    [
        ("run", 'evaluation = "perplexity"', "it names an evaluation: use kdjax eval"),
        ("eval", 'experiment = "ablations"', "it names an experiment: use kdjax run"),
        ("eval", 'evaluation = "perplexit"', "evaluation = 'perplexit' does not exist: did you mean perplexity?"),
        ("eval", 'evaluation = "perplexity"\nwindw = 3', "unknown key 'windw'"),
        ("eval", "x = 1", "no evaluation is named: add evaluation = NAME"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, verb, text, said):
    (tmp_path / "c.toml").write_text(text + "\n")
    assert cli.main([verb, str(tmp_path / "c.toml"), "--out", str(tmp_path / "r"), "--no-plots"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not (tmp_path / "r").exists()
