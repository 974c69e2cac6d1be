"""What benchmarks share whose answers are programs that are run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdjax.errors import KdjaxError
from kdjax.evaluate.benchmarks import generation, sandbox


class Config(generation.Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Programs are run only where `allow_code_execution` is true, within the limits of `sandbox`."""

    allow_code_execution: bool = False
    sandbox: sandbox.Limits = sandbox.Limits()


def ready(config: Config) -> None:
    """Raises KdjaxError where programs may not be run, or the sandbox cannot run any."""
    if not config.allow_code_execution:
        raise KdjaxError(
            "allow_code_execution = false: this benchmark runs programs that the model writes, with limits but not in "
            "a jail (docs/benchmarks.md): --set allow_code_execution=true"
        )
    sandbox.check(config.sandbox)


def grade(config: Config, parts: Sequence[str]) -> dict[str, Any]:
    """Runs the program and its tests. Raises KdjaxError where that is not allowed."""
    if not config.allow_code_execution:
        raise KdjaxError("allow_code_execution = false: --set allow_code_execution=true")
    execution = sandbox.execute(parts, config.sandbox)
    return {"correct": execution.passed, "outcome": execution.outcome, "detail": execution.detail}
