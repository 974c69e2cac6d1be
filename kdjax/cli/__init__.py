"""The `kdjax` command: one module per verb. Nothing here, nor in a verb's `add_arguments`, imports JAX."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kdjax.errors import KdjaxError

VERBS = {"generate": "continue prompts with speculative decoding"}

EXIT_ERROR, EXIT_BUG, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 70, 130, 141


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise KdjaxError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, 2 bad input, 70 a defect of kdjax, 130 Ctrl-C, 141 closed pipe."""
    parser = Parser(prog="kdjax", description="Kimi K2.6 architecture, DDTree speculative decoding, in JAX.")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, summary in VERBS.items():
        module = importlib.import_module(f"kdjax.cli.{name}")
        verb = verbs.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    try:
        args = parser.parse_args(argv)
        status = args.run(args)
        sys.stdout.flush()
        return status
    except KdjaxError as error:
        return _fail(str(error), EXIT_ERROR)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Or the exit of Python flushes into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk, a folder without permission: no defect
        return _fail(
            f"{error.filename or 'the output'}: {error.strerror or error}: make room or give another place", EXIT_ERROR
        )
    except Exception as error:
        if os.environ.get("KDJAX_TRACEBACK"):
            raise
        hint = "set KDJAX_TRACEBACK=1 to see where, and please report it"
        return _fail(f"unexpected {type(error).__name__}: {error}: {hint}", EXIT_BUG)


def _fail(message: str, status: int) -> int:
    print("kdjax: error:", " ".join(message.split()), file=sys.stderr)
    return status
