"""In place of stage 1: the target of an exported checkpoint, for which to train another drafter."""

from __future__ import annotations

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.nano.config import NanoConfig
from experiments.nano.state import save_tree
from kdjax.bundled.locate import locate
from kdjax.checkpoint import load_target
from kdjax.checkpoint.int4 import unpack
from kdjax.errors import KdjaxError
from kdjax.model.int4 import Int4
from kdjax.model.runtime import Runtime


def frozen_params(params: Any) -> dict[Any, Any]:
    """The inverse of `experiments.nano.export.checkpoint_params`."""

    def thawed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        weight = value.get("weight")
        if isinstance(weight, Int4):
            codes = unpack(np.asarray(weight.packed).view(np.int32), weight.columns)
            return {"codes": jnp.asarray(codes), "scale": weight.scale}
        return {name: thawed(part) for name, part in value.items()}

    return thawed(params)


def run(config: NanoConfig, folder: pathlib.Path) -> None:
    """Reads the checkpoint `evaluate.model.target`; writes `folder/target.safetensors`.

    Raises:
        KdjaxError: the checkpoint has another shape than `target`.
    """
    source = locate(config.evaluate.model, needs_drafter=False)[0]
    loaded = load_target(source, Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16"))
    if loaded.config != config.target:
        raise KdjaxError(
            f"{source} has another shape than [target] of the configuration: give the configuration that it was "
            "trained with, or another evaluate.model.target"
        )
    save_tree(folder / "target.safetensors", frozen_params(loaded.params))
