"""Arguments that every verb with a config has."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(overrides=[])
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML config; absent keys take their defaults")
    parser.add_argument(
        "--set", action=Override, dest="overrides", metavar="KEY=VALUE", help="override one key, e.g. decode.budget=31"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved config as TOML and stop")


class Override(argparse.Action):
    """Appends to `overrides` in the order of the command line, so that the last word on a key wins."""

    prefix = ""
    text = False

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        value = json.dumps(values, ensure_ascii=False) if self.text else str(values)
        namespace.overrides = [*namespace.overrides, self.prefix + value]


def shorthand(key: str, *, text: bool = False) -> type[Override]:
    """An option that is short for `--set key=VALUE`; `text` values are never read as TOML."""
    return type("Shorthand", (Override,), {"prefix": f"{key}=", "text": text})
