"""The target: a Kimi-K2 / DeepSeek-V3 checkpoint in Hugging Face layout, in and out."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from kdjax.checkpoint.files import TensorFolder
from kdjax.checkpoint.hf_config import Quantization, read_model_config, read_quantization, write_model_config
from kdjax.checkpoint.layout import Leaf, is_ignored, target_leaves
from kdjax.checkpoint.params import ParamReader, Params, expected_tensors, load_params
from kdjax.checkpoint.progress import Monitor
from kdjax.checkpoint.writer import by_size, write_folder
from kdjax.config import ONE_DEVICE, Int4Config, ModelConfig
from kdjax.errors import KdjaxError
from kdjax.model import k2
from kdjax.model.runtime import Runtime, require_device
from kdjax.sharding import make_mesh, target_shardings

WRAPPER_PREFIX = "language_model."
VISION = ("vision_tower.", "mm_projector.")

# Not `nn.Linear`, so the quantisation target "Linear" does not reach them.
NOT_LINEAR = ("model.embed_tokens", ".mlp.gate")


@dataclasses.dataclass(frozen=True)
class Target:
    """A loaded target. `skipped_tensors` counts the vision tensors of the checkpoint that a text model leaves out."""

    config: ModelConfig
    params: Params
    skipped_tensors: int = 0


def _leaves(config: ModelConfig, quantization: Quantization | None) -> list[Leaf]:
    def int4_of(module: str) -> Int4Config | None:
        return None if quantization is None or is_ignored(module, quantization.ignore) else quantization.int4

    leaves = list(target_leaves(config, int4_of))
    dense = [leaf for leaf in leaves if len(leaf.shape) == 2 and "experts" not in leaf.path]
    for leaf in dense:
        (module,) = leaf.modules
        if not module.endswith(NOT_LINEAR) and int4_of(module) is not None:
            raise KdjaxError(
                f"quantization_config covers {module}, only routed experts can be INT4: add it to `ignore` and store "
                "it as bfloat16"
            )
    return leaves


def load_target(
    path: str | pathlib.Path,
    runtime: Runtime,
    *,
    shardings: Callable[[ModelConfig], Any] | None = None,
    monitor: Monitor | None = None,
) -> Target:
    """Verify a checkpoint, then read it in chunks, every byte once, to the devices that `shardings` says.

    `shardings` makes a tree like the params of `jax.sharding.Sharding` (an `Int4` of two for INT4 matrices); None is
    `kdjax.sharding.target_shardings` over `runtime.mesh`. `monitor` counts bytes and seconds.

    Routed experts are stacked `[E, out, in]`; INT4 stays packed unless `runtime.expert_weights` asks to expand it.
    Other weights take `runtime.compute_dtype` once, here; the router's `e_score_correction_bias` stays float32. With
    `runtime.layout` "fused" all are then rearranged, which takes the memory of the model once more.

    Raises:
        KdjaxError: kernels that this machine cannot run; an unsupported config; or files that are absent, damaged or
            not what the config describes, all such findings in one error. Only NaN and absurd values are found later,
            while weights are read.
    """
    require_device(runtime.backend)
    folder = pathlib.Path(path)
    config = read_model_config(folder)
    leaves = _leaves(config, read_quantization(folder))
    files = TensorFolder(folder, prefix=WRAPPER_PREFIX, skip=VISION, expected=expected_tensors(leaves))
    placed = shardings(config) if shardings else _on_mesh(config, runtime)
    finish = functools.partial(k2.arrange_layer, config=config, runtime=runtime)
    params = load_params(files, leaves, runtime, shardings=placed, finish_layer=finish, monitor=monitor)
    return Target(config, k2.arrange(params, config, runtime), files.skipped)


def _on_mesh(config: ModelConfig, runtime: Runtime) -> Any:
    if runtime.mesh == ONE_DEVICE:
        return None
    return target_shardings(config, runtime, make_mesh(runtime.mesh))


def save_target(
    path: str | pathlib.Path,
    config: ModelConfig,
    params: Params,
    *,
    wrapper: bool = False,
    max_shard_bytes: int | None = None,
) -> None:
    """Write `config.json`, `generation_config.json` and the weights with the names and dtypes of Kimi K2.6.

    `wrapper` adds K2.6's `kimi_k25` object and its `language_model.` prefix around the bare `kimi_k2` layout. Plain
    weights are rounded to bfloat16; with `config.experts_int4` the routed experts must already be `Int4`.

    Raises:
        KdjaxError: params do not fit the config, or the folder already holds weights.
    """
    prefix = WRAPPER_PREFIX if wrapper else ""
    leaves = list(target_leaves(config, lambda module: config.experts_int4))
    reader = ParamReader(params, leaves, prefix)
    write_folder(path, by_size(expected_tensors(leaves, prefix), max_shard_bytes), reader.jobs())
    write_model_config(path, config, wrapper=wrapper)
