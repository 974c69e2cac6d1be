"""Two processes of four devices each, on loopback, as one mesh of eight; and the loss of one of them."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import msgspec
import pytest

from kdjax.checkpoint import save_drafter, save_target
from kdjax.cli import main
from kdjax.errors import KdjaxError
from kdjax.sharding import joined
from tests import xla
from tests.checkpoint.random_models import random_drafter, random_target
from tests.sharding import own_case

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ROOT / "tests" / "data" / "tiktoken_4096.model"
MESH = ["--set", "mesh.tensor=2", "--set", "mesh.expert=4"]
RUNTIME = ["--set", 'runtime.expert_weights="packed"', "--set", "runtime.compilation_cache=false"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> list[str]:
    """A pair that can be cut eight ways, with a tokenizer."""
    folder = tmp_path_factory.mktemp("eight")
    ids = {"bos_token_id": 3840, "eos_token_ids": (3841, 3842), "pad_token_id": 4095}
    target = msgspec.structs.replace(own_case.MODEL, vocab_size=4096, max_position_embeddings=2048, **ids)
    drafter = msgspec.structs.replace(own_case.DRAFTER, vocab_size=4096, mask_token_id=4094)
    save_target(folder / "target", target, random_target(target))
    (folder / "target" / "tiktoken.model").write_bytes(SMALL.read_bytes())
    save_drafter(folder / "drafter", drafter, random_drafter(drafter))
    return ["generate", "--model", str(folder / "target"), "--drafter", str(folder / "drafter"), *RUNTIME, "pair"]


def start(command: list[str], port: int, index: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "kdjax.cli", *command, "--processes", f"127.0.0.1:{port},2,{index}"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": xla.flags(devices=4)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def pair():
    """Starts a command twice, as processes 0 and 1; none of them outlives the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started: list[subprocess.Popen] = []

    def run(*commands: list[str]) -> list[subprocess.Popen]:
        started.extend(start(command, port, index) for index, command in enumerate(commands))
        return started

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_two_processes_of_four_devices_are_one_of_eight(model, pair, capsys):
    command = [*model, *MESH, "--json", "-n", "12", "--budget", "3", "--temperature", "0.7"]
    first, second = pair(command, command)
    out, err = first.communicate(timeout=300)
    assert (first.returncode, second.wait(60)) == (0, 0), err + second.stderr.read()
    assert second.stdout.read() == ""  # one speaks for both
    assert main(command) == 0
    mine, alone = json.loads(out)["streams"][0], json.loads(capsys.readouterr().out)["streams"][0]
    assert mine["token_ids"] == alone["token_ids"] and mine["rounds"] == alone["rounds"]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_lost_process_ends_the_other(model, pair, victim):
    """Killed while text appears; the survivor says so and ends within the heartbeat, where a collective hangs."""
    command = [*model, *MESH, "-n", "1900", "--mode", "autoregressive", "--set", "decode.rounds_per_call=1"]
    processes = pair(command, command)
    while not processes[0].stdout.read(1):
        assert processes[0].poll() is None, processes[0].stderr.read()
    processes[victim].send_signal(signal.SIGKILL)
    began = time.monotonic()
    survivor = processes[1 - victim]
    _, err = survivor.communicate(timeout=90)
    assert time.monotonic() - began < 60
    assert survivor.returncode not in (0, None)
    assert "another process was lost" in err or "another task died" in err, err


def test_processes_with_other_settings_are_refused(model, pair):
    command = [*model, *MESH, "-n", "4"]
    for process in pair(command, [*command, "--seed", "7"]):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        assert "processes [1] were started with other settings or prompts than process 0" in err


@pytest.mark.parametrize("text", ["2", "host,2,0", "host:80,2,2", "host:x,2,0", ":80,1,0"])
def test_malformed_processes_are_named(text):
    with pytest.raises(KdjaxError) as error, joined(text, ""):
        pass
    said = str(error.value)
    assert said.startswith(f"processes={text!r} is neither auto nor HOST:PORT,COUNT,INDEX")
    assert "\n" not in said
