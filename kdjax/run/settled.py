"""What the configs of cells leave to the device, as the device chose it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kdjax.config.sweep import runtimes
from kdjax.model.runtime import settled


def settings(configs: Iterable[msgspec.Struct]) -> dict[str, Any]:
    """By dotted key: the value, or the list of the different values where the device chose differently for some cells.

    Raises KdjaxError like `kdjax.model.runtime.settled`.
    """
    found: dict[str, list[Any]] = {}
    for key, section, mesh in (one for config in configs for one in runtimes(config)):
        chosen = settled(section, mesh) if section.left_open else section
        for name in section.left_open:
            values = found.setdefault(".".join((*key, name)), [])
            if (value := getattr(chosen, name)) not in values:
                values.append(value)
    return {key: values[0] if len(values) == 1 else values for key, values in found.items()}
