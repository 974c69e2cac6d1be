"""Run experiments from TOML configs. A key given as a list is swept over. An interrupted run continues where it was."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Any

from kdjax.cli import studies
from kdjax.cli.interrupt import Interrupt
from kdjax.config.strict import closest
from kdjax.errors import KdjaxError

if TYPE_CHECKING:
    from kdjax.run.experiment import Experiment


def find(name: str) -> Experiment:
    """The module of an experiment. Raises KdjaxError where there is none, or what it needs is not installed."""
    try:
        experiments = importlib.import_module("experiments")
    except ModuleNotFoundError as error:
        raise KdjaxError(
            'the experiments are not part of the installed package: run in a checkout, after pip install -e ".[plots]"'
        ) from error
    if name not in experiments.EXPERIMENTS:
        raise KdjaxError(f"experiment = {name!r} does not exist: {closest(name, experiments.EXPERIMENTS)}")
    module: Any = importlib.import_module(f"experiments.{name}")
    return module


FAMILY = studies.Family("experiment", find, "configs/experiments/budget_sweep.toml", "'decode.budget=[7,15,31]'")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies.add_arguments(parser, FAMILY)


def run(args: argparse.Namespace, interrupt: Interrupt) -> int:
    return studies.run(args, interrupt, FAMILY)
