"""Kimi K2.6 in JAX, with DDTree speculative decoding on a DFlash drafter.

The names below are imported at first use: `import kdjax` and the command line start without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdjax.bundled import bundled_model
    from kdjax.checkpoint import Drafter, Target, load_drafter, load_target
    from kdjax.decode import Commit, Completion, DecodeConfig, Decoder, Engine, Request, Stream
    from kdjax.errors import KdjaxError
    from kdjax.model.runtime import CPU_EXACT, GPU, Runtime
    from kdjax.tokenizer import Tokenizer

__all__ = [
    "CPU_EXACT",
    "GPU",
    "Commit",
    "Completion",
    "DecodeConfig",
    "Decoder",
    "Drafter",
    "Engine",
    "KdjaxError",
    "Request",
    "Runtime",
    "Stream",
    "Target",
    "Tokenizer",
    "bundled_model",
    "load_drafter",
    "load_target",
]

_HOMES = {
    "kdjax.bundled": ("bundled_model",),
    "kdjax.checkpoint": ("Drafter", "Target", "load_drafter", "load_target"),
    "kdjax.decode": ("Commit", "Completion", "DecodeConfig", "Decoder", "Engine", "Request", "Stream"),
    "kdjax.errors": ("KdjaxError",),
    "kdjax.model.runtime": ("CPU_EXACT", "GPU", "Runtime"),
    "kdjax.tokenizer": ("Tokenizer",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
