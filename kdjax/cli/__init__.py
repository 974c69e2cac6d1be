"""The `kdjax` command. Nothing is imported before Ctrl-C is handled, so that an early one leaves no traceback."""

from __future__ import annotations

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the import
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 0, 2 bad input, 70 a defect of kdjax, 130 Ctrl-C, 141 closed pipe.

    Returns it where `argv` is given; otherwise the command is the process, and ends it.
    """
    from kdjax.cli.interrupt import Interrupt, exit_now

    with Interrupt().handled() as interrupt:
        from kdjax.cli.command import run

        status = run(argv, interrupt)
        if argv is None or interrupt.abandoned:
            exit_now(status)
        return status
