"""`kdjax generate` from end to end on a tiny random model."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kdjax.cli import main
from kdjax.config import GenerateConfig, load

pytestmark = pytest.mark.newest
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def command(tiny, cache, monkeypatch):
    monkeypatch.setenv("KDJAX_CACHE_DIR", str(cache))
    pair = ["--model", str(tiny / "target"), "--drafter", str(tiny / "drafter")]
    return ["generate", *pair, "--budget", "6", "-n", "24", "--temperature", "0.7"]


@pytest.fixture
def generate(command, capsys):
    def run(*more: str, status: int = 0) -> tuple[str, str]:
        assert main([*command, *more]) == status
        return capsys.readouterr()

    return run


def start(*argv: str, **options) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "kdjax.cli", *argv],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_compare_says_that_all_modes_give_the_same_tokens(generate):
    result = json.loads(generate("--json", "--compare", "--seed", "3", "def f(x):").out)
    tree = result["modes"]["tree"]
    assert result["identical"] is True and result["new_tokens"] == len(tree["token_ids"]) <= 24
    assert result["modes"]["chain"]["token_ids"] == tree["token_ids"] == result["modes"]["autoregressive"]["token_ids"]
    assert result["modes"]["autoregressive"]["tau_micro"] == 1.0 and result["tau_micro"] >= 1.0
    assert all(0 <= share <= 1 for share in result["acceptance_by_depth"])
    assert all(mode["decode_tokens_per_s"] > 0 for mode in result["modes"].values())


def test_what_takes_long_is_named_while_it_lasts(generate, monkeypatch):
    said = []
    monkeypatch.setattr("rich.status.Status.update", lambda status, text: said.append(text))
    generate("--compare", "x")
    assert said[-3].startswith("compiling") and said[-2:] == [
        f"comparing with mode {m}" for m in ("chain", "autoregressive")
    ]


def test_text_goes_to_stdout_and_the_table_to_stderr(generate):
    out, err = generate("def f(x):")
    result = json.loads(generate("--json", "def f(x):").out)
    assert out == result["text"] + ("" if result["text"].endswith("\n") else "\n")
    assert "tau micro" in err and "\x1b" not in out + err


def test_several_prompts_wait_for_slots_and_keep_their_order_and_tokens(generate, tmp_path):
    prompts = ["def f(x):", "import", "class A"]
    alone = [json.loads(generate("--json", p).out)["streams"][0]["token_ids"] for p in prompts]
    together = json.loads(generate("--json", "--set", "decode.slots=2", *prompts).out)
    assert [stream["token_ids"] for stream in together["streams"]] == alone


def test_a_mesh_gives_the_same_tokens(generate, tmp_path):
    file = tmp_path / "mesh.toml"
    file.write_text("[mesh]\nexpert = 4\n")
    one = json.loads(generate("--json", "pair").out)
    mesh = json.loads(generate("--json", "--mesh", str(file), "--set", "mesh.expert=2", "pair").out)
    for figure in ("token_ids", "rounds", "finish_reason"):
        assert mesh["streams"][0][figure] == one["streams"][0][figure]
    assert mesh["text"] == one["text"]
    said = generate("--mesh", str(file), "pair", status=2).err
    assert "self_attn.kv_b_proj.weight" in said and "cannot be cut into 4 parts" in said


def test_run_folder_is_complete(generate, tmp_path):
    generate("--out", str(tmp_path / "run"), "--compare", "x")
    folder = tmp_path / "run"
    assert load(GenerateConfig, folder / "config.toml").decode.budget == 6
    assert generate("--print-config").out == (folder / "config.toml").read_text()
    assert json.loads((folder / "provenance.json").read_text())["checkpoints"].keys() == {"target", "drafter"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["mode"] for line in lines] == ["tree", "chain", "autoregressive"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["identical"] and summary["interrupted"] is False
    assert "already holds a run" in generate("--out", str(folder), "x", status=2)[1]


def test_what_cannot_be_saved_is_shown(generate, tmp_path):
    (tmp_path / "summary.json.part").symlink_to("/dev/full")
    out, err = generate("--out", str(tmp_path), "--json", "x", status=2)
    said = "summary.json: cannot be written (No space left on device): make room or give another place\n"
    assert json.loads(out)["new_tokens"] > 0 and err == f"kdjax: error: {tmp_path}/{said}"
    assert not (tmp_path / "summary.json").exists()


def test_chat_renders_the_prompt_as_a_user_turn(generate):
    plain, chat = (json.loads(generate("--json", *more, "hi").out) for more in ((), ("--set", "prompt.chat=true")))
    assert plain["streams"][0]["token_ids"] != chat["streams"][0]["token_ids"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["--budget", "100000", "x"],
            "tree budget 100000 at depth 3 needs more than 100000 candidates: lower it to at most 2726",
        ),
        (["--budget", "9" * 20, "x"], "candidates: lower it to at most 2726"),
        (["def f(x): pass\n" * 1000], "the context holds 2048: shorten the prompt"),
        (["-n", "2048", "x"], "lower max_new_tokens to 2047"),
    ],
)
def test_limits_of_model_and_program_are_one_line_errors(generate, argv, said):
    err = generate(*argv, status=2)[1]
    assert err.startswith("kdjax: error: ") and err.count("\n") == 1 and said in err


def test_models_that_do_not_fit_are_one_line_errors(generate, tiny, tmp_path):
    err = generate("--drafter", str(tiny / "stranger"), "x", status=2)[1]
    assert "made for a target of hidden_size 32, but target.hidden_size = 64" in err and err.count("\n") == 1
    broken = tmp_path / "broken"
    shutil.copytree(tiny / "target", broken)
    lines = (broken / "tiktoken.model").read_bytes().splitlines(keepends=True)
    (broken / "tiktoken.model").write_bytes(b"".join(lines[:-1]))
    err = generate("--model", str(broken), "x", status=2)[1]
    assert "the tokenizer has 4095 ids and the model 4096" in err and err.count("\n") == 1


def test_nan_weights_are_a_one_line_error(generate, tiny, tmp_path):
    broken = tmp_path / "nan"
    shutil.copytree(tiny / "target", broken)
    file = next(broken.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("model.norm.weight"))
    tensors[name] = np.full_like(tensors[name], np.nan)
    save_file(tensors, file)
    err = generate("--model", str(broken), "x", status=2)[1]
    assert "NaN" in err and err.count("\n") == 1


def test_ctrl_c_keeps_the_text_so_far(command, foreground):
    # By one token a call, to a pipe nobody reads: many seconds of text, or a full pipe, are left when the signal comes.
    argv = ["-n", "2000", "--mode", "autoregressive", "--set", "decode.rounds_per_call=1", "x"]
    with start(*command, *argv) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert first and out.endswith(b"\n")
    assert b"new tokens" in err and b"tok/s" in err and b"Traceback" not in err
    assert err.endswith(b"\ninterrupted: what is shown is what there was so far\n")


def test_ctrl_c_while_programs_are_compiled_leaves_at_once(command, foreground, tmp_path, monkeypatch):
    monkeypatch.setenv("KDJAX_CACHE_DIR", str(tmp_path))
    with start(*command, "--json", "x") as process:
        while not any(tmp_path.glob("xla/*")):  # small programs of the load come first, the large ones take seconds
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, b"", b"interrupted\n")


def test_a_chain_says_where_it_cannot_use_the_budget_that_was_asked_for(generate, command, capsys):
    assert "a chain drafts" not in generate("--mode", "chain", "--budget", "3", "x")[1]
    assert ", not 99" in generate("--mode", "chain", "--budget", "99", "x")[1]
    pair = command[: command.index("--budget")]
    assert main([*pair, "--mode", "chain", "-n", "2", "x"]) == 0  # the default budget is nobody's wish
    assert "a chain drafts" not in capsys.readouterr().err


def test_a_closed_pipe_ends_quietly(command):
    with start(*command, "-n", "500", "x") as process:
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 141 and b"Traceback" not in err and b"Exception" not in err


def test_stdin_is_read_and_the_compilation_cache_filled(command, tmp_path, monkeypatch):
    monkeypatch.setenv("KDJAX_CACHE_DIR", str(tmp_path))
    process = start(*command, "--json", stdin=subprocess.PIPE)
    out, err = process.communicate(b"def f", timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["new_tokens"] > 0 and err == b""
    assert list((tmp_path / "xla").iterdir())
