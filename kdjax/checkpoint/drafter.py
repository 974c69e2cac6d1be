"""The DFlash drafter: a checkpoint in z-lab's layout, in and out."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from kdjax import drafter as dflash
from kdjax.checkpoint.files import TensorFolder, sha256
from kdjax.checkpoint.hf_config import read_drafter_config, write_drafter_config
from kdjax.checkpoint.layout import drafter_leaves
from kdjax.checkpoint.params import ParamReader, Params, expected_tensors, load_params
from kdjax.checkpoint.progress import Monitor
from kdjax.checkpoint.revision import check_revisions
from kdjax.checkpoint.writer import by_size, write_folder
from kdjax.config import ONE_DEVICE, DrafterConfig, DrafterOverrides, ModelConfig, check_pair
from kdjax.errors import KdjaxError
from kdjax.model.runtime import Runtime, require_device
from kdjax.sharding import drafter_specs, make_mesh
from kdjax.sharding import shardings as shardings_of


@dataclasses.dataclass(frozen=True)
class Drafter:
    """`mismatch_allowed`: it need not have been trained for the target that it is used with."""

    config: DrafterConfig
    params: Params
    mismatch_allowed: bool = False


def load_drafter(
    path: str | pathlib.Path,
    runtime: Runtime,
    target_config: ModelConfig,
    *,
    target_path: str | pathlib.Path | None = None,
    allow_mismatch: bool = False,
    overrides: DrafterOverrides | None = None,
    expected_sha256: str | None = None,
    shardings: Callable[[DrafterConfig], Any] | None = None,
    monitor: Monitor | None = None,
) -> Drafter:
    """Verify a checkpoint and that it belongs to the target, then read it. Weights take `runtime.compute_dtype`.

    Args:
        path: the folder.
        runtime: static.
        target_config: of the target; layers, hidden size and vocabulary must be those the drafter was trained for.
        target_path: the target's folder, to compare the names of the two published models where they are known.
        allow_mismatch: use the drafter with another target than its own, as long as it can run.
        overrides: change how it attends, against its config.json.
        expected_sha256: pins the bytes (`kdjax.checkpoint.sha256`): different drafters have been published under one
            name.
        shardings: as of `load_target`.
        monitor: as of `load_target`.

    Raises:
        KdjaxError: kernels that this machine cannot run, an unsupported config, a drafter for another target, damaged
            files, or another hash.
    """
    require_device(runtime.backend)
    config = read_drafter_config(path)
    if overrides is not None:
        config = overrides.apply(config)
    check_pair(target_config, config, allow_mismatch=allow_mismatch)
    if target_path is not None and not allow_mismatch:
        check_revisions(path, target_path)
    if expected_sha256 is not None and (found := sha256(path)) != expected_sha256:
        raise KdjaxError(f"{path} has sha256 {found}, expected {expected_sha256}: use the pinned revision")
    leaves = list(drafter_leaves(config))
    files = TensorFolder(path, expected=expected_tensors(leaves))
    placed = shardings(config) if shardings else _on_mesh(config, runtime)
    params = load_params(files, leaves, runtime, shardings=placed, monitor=monitor)
    return Drafter(config, dflash.arrange(params, runtime), allow_mismatch)


def _on_mesh(config: DrafterConfig, runtime: Runtime) -> Any:
    if runtime.mesh == ONE_DEVICE:
        return None
    specs = drafter_specs(dflash.abstract_params(config, runtime), config, runtime.mesh)
    return shardings_of(specs, make_mesh(runtime.mesh))


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
