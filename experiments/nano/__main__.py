"""`python -m experiments.nano STAGE CONFIG --out DIR`: trains and measures the small bundled model."""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys

from experiments.nano.config import NanoConfig
from kdjax.config.strict import load
from kdjax.errors import KdjaxError

STAGES = {
    "target": "train_target",
    "restore": "restore",
    "drafter": "train_drafter",
    "export": "export",
    "evaluate": "evaluate",
    "report": "report",
}
"""Modules by stage, imported only when asked for: each has `run(config, folder)`."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.nano", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="run folder; an interrupted run continues")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config value")
    args = parser.parse_args()
    try:
        config = load(NanoConfig, args.config, args.set)
        args.out.mkdir(parents=True, exist_ok=True)
        stage = importlib.import_module(f"experiments.nano.{STAGES[args.stage]}")
        stage.run(config, args.out)
    except KdjaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
