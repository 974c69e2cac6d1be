"""The command line: one module per verb. Nothing here, nor in a verb's `add_arguments`, imports JAX."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kdjax.cli.interrupt import Interrupt
from kdjax.errors import KdjaxError

VERBS = {
    "bench": "measure kernels and whole decode steps",
    "bundle": "make and check golden bundles",
    "compare": "two runs of an experiment, with confidence intervals",
    "eval": "evaluate models from configs: perplexity, agreement, exactness, benchmarks",
    "generate": "continue prompts with speculative decoding",
    "plan": "memory and time on a mesh, without its devices",
    "quantize": "make an INT4 checkpoint of a bf16 one",
    "run": "run experiments from their configs: tables, plots, findings",
    "synth": "write a checkpoint of random weights at any scale",
}

EXIT_ERROR, EXIT_BUG, EXIT_BROKEN_PIPE = 2, 70, 141


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise KdjaxError(f"{message} (see {self.prog} --help)")


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib import metadata  # slow

        try:
            version = metadata.version("kdjax")
        except metadata.PackageNotFoundError:
            version = "of a source tree that is not installed"
        print("kdjax", version)
        parser.exit()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="kdjax",
        description="Kimi K2.6 architecture, DDTree speculative decoding, in JAX.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and stop")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, summary in VERBS.items():
        module = importlib.import_module(f"kdjax.cli.{name}")
        verb = verbs.add_parser(name, help=summary, description=module.__doc__, allow_abbrev=False)
        module.add_arguments(verb)
        verb.set_defaults(run=module.run, verb=verb)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        dash = "; put -- before a prompt that begins with a dash" if "prompts" in args else ""
        args.verb.error(f"unrecognized arguments: {' '.join(unknown)}{dash}")
    return args


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> int:
    """The exit status; see `main`."""
    try:
        args = _parse(argv)
        status = args.run(args, interrupt)
        sys.stdout.flush()
        return status
    except KdjaxError as error:
        return _fail(str(error), EXIT_ERROR)
    except BrokenPipeError:
        # Or the exit of Python flushes into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk, a folder without permission: no defect
        file = error.filename2 or error.filename or "the output"  # that of a copy names its source first
        return _fail(f"{file}: {error.strerror or error}: make room or give another place", EXIT_ERROR)
    except Exception as error:
        if os.environ.get("KDJAX_TRACEBACK"):
            raise
        hint = "set KDJAX_TRACEBACK=1 to see where, and please report it"
        return _fail(f"unexpected {type(error).__name__}: {error}: {hint}", EXIT_BUG)


def _fail(message: str, status: int) -> int:
    print("kdjax: error:", " ".join(message.split()), file=sys.stderr)
    return status
