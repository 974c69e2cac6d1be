"""The DFlash drafter: a checkpoint in z-lab's layout, in and out."""

from __future__ import annotations

import dataclasses
import pathlib

from kdjax import drafter as dflash
from kdjax.checkpoint.files import TensorFolder, sha256
from kdjax.checkpoint.hf_config import read_drafter_config, write_drafter_config
from kdjax.checkpoint.layout import drafter_leaves
from kdjax.checkpoint.params import ParamReader, Params, expected_tensors, load_params
from kdjax.checkpoint.writer import by_size, write_folder
from kdjax.config import DrafterConfig, ModelConfig, ModelPair
from kdjax.errors import KdjaxError
from kdjax.model.runtime import Runtime


@dataclasses.dataclass(frozen=True)
class Drafter:
    config: DrafterConfig
    params: Params


def load_drafter(
    path: str | pathlib.Path, runtime: Runtime, target_config: ModelConfig, *, expected_sha256: str | None = None
) -> Drafter:
    """Read config and weights and check that they belong to the target. Weights take `runtime.compute_dtype`.

    `expected_sha256` pins the bytes (`kdjax.checkpoint.sha256`): different drafters have been published under one name.

    Raises:
        KdjaxError: an unsupported config, a drafter for another target, damaged files, or another hash.
    """
    config = read_drafter_config(path)
    ModelPair(target=target_config, drafter=config)
    if expected_sha256 is not None and (found := sha256(path)) != expected_sha256:
        raise KdjaxError(f"{path} has sha256 {found}, expected {expected_sha256}: use the pinned revision")
    leaves = list(drafter_leaves(config))
    params = load_params(TensorFolder(path, expected=expected_tensors(leaves)), leaves, runtime)
    return Drafter(config, dflash.arrange(params, runtime))


def save_drafter(
    path: str | pathlib.Path, config: DrafterConfig, params: Params, *, max_shard_bytes: int | None = None
) -> None:
    """Write `config.json` and the weights with z-lab's names; weights are rounded to bfloat16.

    Raises:
        KdjaxError: params do not fit the config, or the folder already holds weights.
    """
    leaves = list(drafter_leaves(config))
    write_folder(path, by_size(expected_tensors(leaves), max_shard_bytes), ParamReader(params, leaves).jobs())
    write_drafter_config(path, config)
