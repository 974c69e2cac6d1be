"""Every mistake on the command line: exit status 2, one line on stderr with the value and the remedy, no traceback."""

import io
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from kdjax.bundled import bundled_model
from kdjax.cli import main

pytestmark = pytest.mark.newest
ROOT = pathlib.Path(__file__).parents[2]
TARGET = str(ROOT / "kdjax/bundled/nano/target")


@pytest.fixture
def refused(capsys):
    def run(*argv: str) -> str:
        assert main(list(argv)) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("kdjax: error: ") and err.count("\n") == 1
        return err

    return run


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "the following arguments are required: VERB (see kdjax --help)"),
        (["generat", "x"], "invalid choice: 'generat'"),
        (["generate", "--bugdet", "3", "x"], "unrecognized arguments: --bugdet; put -- before"),
        (["generate", "--budg", "3", "x"], "unrecognized arguments: --budg; put -- before"),
        (
            ["generate", "-x"],
            "unrecognized arguments: -x; put -- before a prompt that begins with a dash (see kdjax generate --help)",
        ),
        (["generate", "-n", "-5", "--", "-x"], "error: -n -5: expected"),
        (["compare", "a", "b", "-x"], "unrecognized arguments: -x (see kdjax compare --help)"),
        (["generate", "x", "--set", "decode.bugdet=3"], "unknown key 'bugdet' in [decode]: did you mean budget?"),
        (["generate", "x", "--set", "decode.budget"], "expected KEY=VALUE"),
        (["generate", "x", "--budget", "many"], "error: --budget many: expected `int`, got `str`"),
        (["generate", "x", "--budget", "-1"], "error: --budget -1: expected `int` >= 0"),
        (["generate", "x", "-n", "0"], "error: -n 0: expected `int` >= 1"),
        (["generate", "x", "-n", "-5"], "error: -n -5: expected `int` >= 1"),
        (["generate", "x", "--temperature", "nan"], "error: --temperature nan: expected `float` >= 0"),
        (["generate", "x", "--mode", "tre"], "error: --mode tre: not one of its values: did you mean tree?"),
        (["generate", "x", "--set", "decode.mode=tre"], "decode.mode = 'tre': not one of its values"),
        (["generate", "x", "--set", "runtime.backend=cuda"], "runtime.backend = 'cuda': not one of its values"),
        (["generate", "x", "--config", "nowhere/x.toml"], "nowhere/x.toml: no such config file"),
        (
            ["generate", "x", "--set", "prompt.thinking=true"],
            "--set prompt.thinking=true: prompt.thinking = true is for chat only: set prompt.chat = true too",
        ),
        (["generate", "x", "--set", "prompt.system=be brief"], "prompt.system = 'be brief' is for chat only: set"),
        (["generate", "x", "--set", "prompt.system="], "prompt.system = '' is for chat only: set"),
        (["generate", ""], "the prompt is empty: there is nothing to continue"),
        (["generate", "-", "-"], "'-' is given more than once"),
        (["generate", "--file", "nowhere.txt"], "nowhere.txt: cannot read the prompt (No such file or directory)"),
        (["generate", "x", "--model", "bundled:nanno"], "'nanno' is not a bundled model: did you mean nano?"),
        (["generate", "x", "--model", "nowhere"], "model.target = 'nowhere': no such folder"),
        (["generate", "x", "--model", "n" * 300], ": cannot look there (File name too long)"),
        (["generate", "x", "--model", TARGET], "target' comes without a drafter: give one with --drafter"),
        (["generate", "x", "--model", TARGET, "--drafter", "nowhere"], "model.drafter = 'nowhere': no such folder"),
        (["generate", "x", "--model", "/"], "model.target = '/' is no checkpoint, it has no config.json: give a"),
        (["generate", "x", "--model", TARGET, "--drafter", "/"], "model.drafter = '/' is no checkpoint, it has no"),
        (["bundle", "make", "x", "", "--out", "x.safetensors"], "the prompt is empty: there is nothing to continue"),
    ],
)
def test_mistake_is_one_line_with_the_remedy(refused, argv, said):
    assert said in refused(*argv)


def test_prompt_files_must_be_utf8_and_not_empty(refused, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"abc\xff")
    assert "byte 3 is not UTF-8" in refused("generate", "--file", str(file))
    file.write_bytes(b"")
    assert f"{file} is empty" in refused("generate", "--file", str(file))


def test_without_a_prompt_a_terminal_is_told_and_a_pipe_is_read(refused, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    assert "no prompt: give one as argument, with --file FILE, or on stdin" in refused("generate")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert "stdin is empty" in refused("generate")
    monkeypatch.setattr("sys.stdin", None)
    assert "no prompt: give one" in refused("generate")
    assert "stdin is closed: give the prompt as argument" in refused("generate", "-")


def test_a_run_folder_that_cannot_be_is_refused_before_anything_is_loaded(refused, tmp_path):
    (tmp_path / "config.toml").touch()
    model = ["--model", TARGET, "--mode", "autoregressive"]
    assert "already holds a run" in refused("generate", "x", *model, "--out", str(tmp_path))
    below = tmp_path / "config.toml" / "below"
    assert f"{below}: cannot be written (Not a directory)" in refused("generate", "x", *model, "--out", str(below))


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "x", "--budget", "100000"],
        ["generate", "x", "--budget", "100000", "--mode", "chain", "--compare"],
        ["eval", "configs/evals/exactness.toml", "--set", "decode.budget=[7,100000]"],
        ["run", "configs/experiments/budget_sweep.toml", "--set", "decode.budget=[7,100000]"],
        ["run", "configs/experiments/ablations.toml", "--set", "widths=[[1,100000]]"],
    ],
    ids=" ".join,
)
def test_a_budget_that_no_decoder_accepts_is_refused_before_anything_is_loaded(refused, argv, tmp_path, monkeypatch):
    shutil.copytree(bundled_model("nano"), tmp_path / "nano")  # loaded by no other test

    def loaded(*_, **__):
        raise AssertionError("weights were read before the budget was looked at")

    monkeypatch.setattr("kdjax.checkpoint.target.load_params", loaded)
    if argv[0] == "generate":
        where = [f"--model={tmp_path / 'nano/target'}", f"--drafter={tmp_path / 'nano/drafter'}"]
    else:
        where = [f"--set=model.target={tmp_path / 'nano/target'}", f"--set=model.drafter={tmp_path / 'nano/drafter'}"]
        where += ["--no-plots", f"--out={tmp_path / 'run'}"]
        argv = [argv[0], str(ROOT / argv[1]), *argv[2:]]
    assert "tree budget 100000 at depth 7 needs more than 100000 candidates" in refused(*argv, *where)


def test_an_unexpected_error_is_one_line_too(capsys, monkeypatch):
    def broken(*_):
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("kdjax.cli.prompts.read", broken)
    monkeypatch.delenv("KDJAX_TRACEBACK", raising=False)
    assert main(["generate", "x"]) == 70
    assert capsys.readouterr().err.startswith(
        "kdjax: error: unexpected RuntimeError: first second: set KDJAX_TRACEBACK"
    )
    monkeypatch.setenv("KDJAX_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        main(["generate", "x"])


def test_a_full_disk_is_no_defect():
    argv = [sys.executable, "-m", "kdjax.cli", "generate", "--print-config"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "kdjax: error: the output: No space left on device: make room or give another place\n"


def test_version_and_help_with_defaults(capsys):
    for argv, said in ((["--version"], "kdjax "), (["generate", "--help"], "default bundled:nano")):
        with pytest.raises(SystemExit) as left:
            main(argv)
        assert left.value.code == 0 and said in capsys.readouterr().out


def test_print_config_shows_what_would_run(capsys, refused):
    argv = ["generate", "--budget", "7", "--set", "decode.budget=31", "--print-config", "--model", "12"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "budget = 31\n" in out and 'target = "12"\n' in out
    assert 'compute_dtype = "float32"\n' in out and 'backend = "xla"\n' in out and 'layout = "fused"\n' in out
    assert "needs an NVIDIA GPU" in refused("generate", "--print-config", "--set", "runtime.backend=triton")


def test_help_and_bad_input_do_not_import_jax():
    code = "import sys; from kdjax.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += "sys.exit(any(m.split('.')[0] in ('jax', 'flax') for m in sys.modules))"
    for argv in (
        ["--help"],
        ["generate", "--help"],
        ["synth", "--help"],
        ["quantize", "--help"],
        ["bundle", "check", "--help"],
        ["plan", "--help"],
        ["generate", "x", "--budget", "-1"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *argv],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
