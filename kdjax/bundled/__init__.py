"""Models small enough to ship inside the package."""

from __future__ import annotations

from pathlib import Path

from kdjax.config.strict import closest
from kdjax.errors import KdjaxError

SHELF = Path(__file__).parent


def bundled_model(name: str) -> Path:
    """The folder of a bundled model: `target` and `drafter` in it are checkpoints in the Hugging Face layout.

    Raises KdjaxError for a name that is not bundled.
    """
    names = sorted(folder.parent.name for folder in SHELF.glob("*/target"))
    if name not in names:
        raise KdjaxError(f"{name!r} is not a bundled model: {closest(name, names)}")
    return SHELF / name
