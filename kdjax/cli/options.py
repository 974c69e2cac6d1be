"""Arguments that every verb with a config has."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(overrides=[], typed={})
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML config; absent keys take their defaults")
    parser.add_argument(
        "--set", action=Override, dest="overrides", metavar="KEY=VALUE", help="override one key, e.g. decode.budget=31"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print as TOML what would run on this device, and stop"
    )


class Override(argparse.Action):
    """Appends to `overrides` in the order of the command line, so that the last word on a key wins."""

    prefix = ""
    text = False

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        value = json.dumps(values, ensure_ascii=False) if self.text else str(values)
        override = self.prefix + value
        namespace.overrides = [*namespace.overrides, override]
        if self.prefix:
            namespace.typed = namespace.typed | {override: f"{option_string} {values}"}


def as_typed(message: str, typed: dict[str, str]) -> str:
    """An error about an override, said of the option that was typed for it."""
    for override, option in typed.items():
        said = "--set " + override.replace("\n", "\\n") + ": "
        if message.startswith(said):
            key = re.escape(override.partition("=")[0])
            return f"{option}: " + re.sub(rf"^{key} = .*?: (?=expected|not one)", "", message.removeprefix(said))
    return message


def shorthand(key: str, *, text: bool = False) -> type[Override]:
    """An option that is short for `--set key=VALUE`; `text` values are never read as TOML."""
    return type("Shorthand", (Override,), {"prefix": f"{key}=", "text": text})


def at_least(minimum: int) -> Callable[[str], int]:
    """The `type` of an argument that is an integer of at least `minimum`."""

    def parse(text: str) -> int:
        if not (text.isdecimal() and int(text) >= minimum):
            raise argparse.ArgumentTypeError(f"expected an integer of at least {minimum}, not {text!r}")
        return int(text)

    return parse
