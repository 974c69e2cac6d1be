"""Run by `sandbox` in a process of its own, with the interpreter alone: applies the limits, then runs the program.

Three processes: this one waits; its child is the first of new namespaces where those are allowed, so that all that the
program leaves behind dies with it; the grandchild limits itself and runs the program.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import types

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 8, 38
CAPABILITY_VERSION_3, MAY_READ = 0x20080522, 1 << 2  # CAP_DAC_READ_SEARCH
NOBODY = 65534
ENDED_BY_SIGNAL = 64
DETAIL = 200


def main() -> None:
    job = json.load(sys.stdin.buffer)
    report = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    isolated = unshare()
    _in_child(lambda: _first(job, report, isolated))


def unshare() -> bool:
    """Whether this process's children get namespaces of their own: no network, and a tree that dies as one."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    wanted = CLONE_NEWPID | CLONE_NEWNET
    return libc.unshare(wanted) == 0 or libc.unshare(wanted | CLONE_NEWUSER) == 0


def _first(job: dict, report: int, isolated: bool) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _in_child(lambda: _program(job, report, isolated))


def _in_child(run) -> None:
    """Runs in a forked child, and ends this process as the child ended."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else ENDED_BY_SIGNAL + os.WTERMSIG(status)
    os._exit(code)


def limit(limits: dict) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.getuid() == 0:
        _become_nobody()
    size = limits["memory_mb"] * 2**20
    cpu = limits["cpu_s"]
    for what, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, size, size),
        (resource.RLIMIT_FSIZE, limits["file_mb"] * 2**20, limits["file_mb"] * 2**20),
        (resource.RLIMIT_NPROC, 0, 0),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(what, (soft, hard))


def _become_nobody() -> None:
    """Limits on processes do not hold for root. What root could read stays readable: Python may be among it.

    Where a container withholds the right to change users, root stays root.
    """
    linux = sys.platform.startswith("linux")
    libc = ctypes.CDLL(None)
    if linux:
        libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:
        return
    if linux:
        words = ctypes.c_uint32
        libc.capset((words * 2)(CAPABILITY_VERSION_3, 0), (words * 6)(MAY_READ, MAY_READ, 0, 0, 0, 0))


def _program(job: dict, report: int, isolated: bool) -> None:
    limit(job["limits"])
    write, leave, dumps, secret = os.write, os._exit, json.dumps, job["secret"]
    said = {"secret": secret, "isolated": isolated, **run(job["parts"])}
    write(report, dumps(said).encode() + b"\n")
    leave(0)


def run(parts: list) -> dict:
    """The outcome of the parts, one after another in one module. Only what gets through all of them has passed."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        for number, part in enumerate(parts):
            exec(compile(part, f"<part {number}>", "exec", dont_inherit=True), module.__dict__)
    except AssertionError as error:
        return {"outcome": "wrong", "detail": _said(error)}
    except SystemExit as error:
        return {"outcome": "exited", "detail": _said(error)}
    except BaseException as error:
        return {"outcome": "exception", "detail": _said(error)}
    return {"outcome": "passed", "detail": ""}


def _said(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException:
        text = ""
    return " ".join(f"{name}: {text}".split())[:DETAIL].rstrip(": ")


if __name__ == "__main__":
    main()
