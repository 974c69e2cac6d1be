"""Pallas Mosaic GPU as all the JAX versions here have it."""

from __future__ import annotations

import inspect
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def load(ref: Any, layout: Any) -> Any:
    index = inspect.signature(plgpu.load).parameters.get("idx")  # JAX 0.10 wants one, 0.11 warns of it
    required = ((),) if index is not None and index.default is index.empty else ()
    return plgpu.load(ref, *required, layout=layout, optimized=False)
