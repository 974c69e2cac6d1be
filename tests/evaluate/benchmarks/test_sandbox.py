"""Programs that misbehave: none may pass, hang, hurt this machine or outlive its run."""

import os
import pathlib
import threading
import time

import pytest

from kdjax.errors import KdjaxError
from kdjax.evaluate.benchmarks import sandbox
from kdjax.evaluate.benchmarks.sandbox import Limits, check, execute

LIMITS = Limits(wall_s=20, cpu_s=1, memory_mb=256, file_mb=1)
HANGING = Limits(wall_s=2, cpu_s=5, memory_mb=256, file_mb=1)
TESTS = "assert f(1) == 2"


@pytest.mark.parametrize(
    "program, outcome, detail",
    [
        ("def f(x): return x + 1", "passed", ""),
        ("def f(x): return x", "wrong", "AssertionError"),
        ("def f(x): return y", "exception", "NameError: name 'y' is not defined"),
        ("def f(x:", "exception", "SyntaxError"),
        ("def f(x): return f(x)", "exception", "RecursionError"),
        ("def f(x): return 2\n'''", "exception", "SyntaxError"),
        ("import sys\nsys.exit(0)", "exited", "SystemExit: 0"),
        ("import sys\ndef f(x): sys.exit(0)", "exited", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "exception", "KeyboardInterrupt"),
        ("import os\nos._exit(0)", "exited", "before its tests"),
        ("import os\ndef f(x): os.kill(os.getpid(), 11)", "crashed", "SIGSEGV"),
        ("while True: pass", "timeout", "CPU time"),
        ("def f(x): return 'a' * 10**10", "exception", "MemoryError"),
        ("open('x', 'wb').write(b'0' * 2**22)", "exception", "File too large"),
        ("import subprocess\nsubprocess.run(['true'])", "exception", "BlockingIOError"),
        ("import threading\nthreading.Thread(target=print).start()", "exception", "can't start new thread"),
        ("class E(BaseException):\n    def __str__(self): raise self\nraise E", "exception", "E"),
        ("import builtins\nbuiltins.AssertionError = SystemExit\ndef f(x): return 1", "exception", ""),
        ("f = lambda x: input()", "exception", "EOFError"),
        ("__name__ == '__main__' and 1 / 0\ndef f(x): return x + 1", "passed", ""),
        (
            "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nf = lambda x: A(x).x + 1",
            "passed",
            "",
        ),
    ],
)
def test_outcomes(program, outcome, detail):
    execution = execute([program, TESTS], LIMITS)
    assert execution.outcome == outcome and detail in execution.detail
    assert execution.passed == (outcome == "passed")


@pytest.fixture
def own_child(tmp_path, monkeypatch):
    """The child's file under a path of this test's own: tests of other processes run sandboxes too."""
    file = tmp_path / "sandbox_child.py"
    file.write_bytes(pathlib.Path(sandbox.sandbox_child.__file__).read_bytes())
    monkeypatch.setattr(sandbox.sandbox_child, "__file__", str(file))
    return file


@pytest.mark.parametrize("program", ["import time\ntime.sleep(60)", "import os, time\nos.setsid()\ntime.sleep(60)"])
def test_waiting_ends_at_the_wall_limit_and_leaves_nothing(program, own_child):
    began = time.monotonic()
    found: list[bool] = []
    search = threading.Timer(1, lambda: found.append(_alive(own_child)))
    search.start()
    execution = execute([program, ""], HANGING)
    assert execution.outcome == "timeout" and "2 s" in execution.detail
    assert time.monotonic() - began < 10
    search.join()
    assert found == [True], "the search must find the child while it runs"
    time.sleep(0.2)
    assert not _alive(own_child)


def test_forks_stop_at_once(own_child):
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except BaseException:\n        pass"
    assert execute([bomb, ""], LIMITS).outcome == "timeout"
    time.sleep(0.2)
    assert not _alive(own_child)


def test_output_floods_nothing():
    for flood in (
        "import sys\nwhile True: sys.stdout.write('x' * 10**6)",
        "import os\nfor fd in range(1, 64):\n    try:\n        while True: os.write(fd, b'x' * 10**6)\n"
        "    except OSError: pass",
    ):
        assert not execute([flood, ""], LIMITS).passed


def test_a_report_cannot_be_guessed():
    forged = 'b\'{"secret": "", "outcome": "passed", "isolated": true, "detail": ""}\\n\''
    forge = f"import os\nfor fd in range(64):\n    try: os.write(fd, {forged})\n    except OSError: pass"
    assert not execute([forge, "assert False"], LIMITS).passed


def test_environment_folder_and_user(tmp_path, monkeypatch):
    monkeypatch.setenv("KDJAX_SECRET", "x")
    outside = tmp_path / "outside"
    seen = "import os\nassert 'KDJAX_SECRET' not in os.environ\nassert os.listdir() == []\nopen('mine', 'w').close()"
    assert execute([seen, ""], LIMITS).passed
    if os.getuid() == 0:
        assert execute(["import os", "assert os.getuid() != 0"], LIMITS).passed
        os.chmod(tmp_path, 0o755)
        assert "PermissionError" in execute([f"open({str(outside)!r}, 'w')", ""], LIMITS).detail
    assert not outside.exists()


def test_no_network_where_namespaces_are_allowed():
    if not check(LIMITS).isolated:
        pytest.skip("this machine allows no namespaces")
    dial = "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=1)"
    assert "unreachable" in execute([dial, ""], LIMITS).detail


def test_a_sandbox_that_runs_nothing_is_an_error(monkeypatch):
    with pytest.raises(KdjaxError, match="cannot run a program that must pass"):
        check(Limits(wall_s=0.001))
    monkeypatch.setattr(sandbox.sandbox_child, "__file__", "/nonexistent.py")
    with pytest.raises(KdjaxError, match="cannot run a program that must pass"):
        check(LIMITS)


def _alive(child: pathlib.Path) -> bool:
    """Whether a process that runs this child, or was forked from one, is still there."""
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(child) in file.read_bytes():
                return True
        except OSError:
            continue
    return False
