"""`python -m experiments.nano STAGE CONFIG --out DIR`: trains and measures the small bundled model."""

from __future__ import annotations

import argparse
import pathlib
import sys

from experiments.nano.config import NanoConfig
from kdjax.config.strict import load
from kdjax.errors import KdjaxError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.nano", description=__doc__)
    parser.add_argument("stage", choices=["target", "drafter", "export", "evaluate"])
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="run folder; an interrupted run continues")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config value")
    args = parser.parse_args()
    try:
        config = load(NanoConfig, args.config, args.set)
        args.out.mkdir(parents=True, exist_ok=True)
        if args.stage == "target":
            from experiments.nano import train_target as stage
        elif args.stage == "drafter":
            from experiments.nano import train_drafter as stage
        elif args.stage == "export":
            from experiments.nano import export as stage
        else:
            from experiments.nano import evaluate as stage
        stage.run(config, args.out)
    except KdjaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
