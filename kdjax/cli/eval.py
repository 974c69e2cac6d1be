"""Evaluate models from TOML configs. A key given as a list is swept over. An interrupted run continues where it was."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Any

from kdjax.cli import studies
from kdjax.cli.interrupt import Interrupt
from kdjax.config.strict import closest
from kdjax.errors import KdjaxError

if TYPE_CHECKING:
    from kdjax.run.experiment import Evaluation


def find(name: str) -> Evaluation:
    """The module of an evaluation. Raises KdjaxError where there is none of that name."""
    from kdjax.evaluate import EVALUATIONS

    if name not in EVALUATIONS:
        raise KdjaxError(f"evaluation = {name!r} does not exist: {closest(name, EVALUATIONS)}")
    module: Any = importlib.import_module(EVALUATIONS[name])
    return module


FAMILY = studies.Family(
    "evaluation", find, "configs/evals/perplexity.toml", "'runtime.compute_dtype=[float32,bfloat16]'"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies.add_arguments(parser, FAMILY)


def run(args: argparse.Namespace, interrupt: Interrupt) -> int:
    return studies.run(args, interrupt, FAMILY)
