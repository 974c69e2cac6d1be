from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kdjax.errors import KdjaxError


def read(arguments: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Prompts in the order argument, file; `-` and, without any prompt, a piped stdin are read to their end.

    Texts are taken as they stand, final newline included. Raises KdjaxError for an empty prompt, none at all, an
    unreadable file, or bytes that are not UTF-8.
    """
    if not arguments and not files:
        if sys.stdin is None or sys.stdin.isatty():
            raise KdjaxError("no prompt: give one as argument, with --file FILE, or on stdin")
        arguments = ["-"]
    if (list(arguments) + [str(f) for f in files]).count("-") > 1:
        raise KdjaxError("'-' is given more than once: stdin can be read once")
    prompts = [_stdin() if text == "-" else ("the prompt", text) for text in arguments]
    prompts += [_stdin() if str(file) == "-" else _file(file) for file in files]
    for name, text in prompts:
        if not text:
            raise KdjaxError(f"{name} is empty: there is nothing to continue")
    return [text for _, text in prompts]


def _stdin() -> tuple[str, str]:
    if sys.stdin is None:
        raise KdjaxError("stdin is closed: give the prompt as argument or with --file FILE")
    return "stdin", _text("stdin", sys.stdin.buffer.read())


def _file(path: Path) -> tuple[str, str]:
    try:
        return str(path), _text(str(path), path.read_bytes())
    except OSError as error:
        raise KdjaxError(f"{path}: cannot read the prompt ({error.strerror})") from error


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise KdjaxError(f"{name}: byte {error.start} is not UTF-8: convert the prompt to UTF-8") from error
