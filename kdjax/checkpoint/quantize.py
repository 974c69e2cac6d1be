"""A bf16 checkpoint folder -> the same folder with its routed experts in pack-quantized INT4, as K2.6 is published."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np

from kdjax.checkpoint import int4
from kdjax.checkpoint.files import TensorFolder
from kdjax.checkpoint.hf_config import IGNORE, quantization_json, read_model_config
from kdjax.checkpoint.layout import Leaf, Stored, target_leaves
from kdjax.checkpoint.params import expected_tensors
from kdjax.checkpoint.target import VISION, WRAPPER_PREFIX
from kdjax.checkpoint.writer import Job, Progress, by_size, write_folder
from kdjax.config import Int4Config
from kdjax.errors import KdjaxError
from kdjax.output import write_text

SHARD_BYTES = 10 * 10**9


@dataclasses.dataclass(frozen=True)
class Quantized:
    """What `quantize_folder` did: matrices made INT4, other tensors copied, bytes of all tensors before and after."""

    matrices: int
    copied: int
    bytes_before: int
    bytes_after: int


def quantize_folder(
    source: str | pathlib.Path,
    folder: str | pathlib.Path,
    *,
    group_size: int = 32,
    rule: int4.ScaleRule = "max/7.5",
    max_shard_bytes: int = SHARD_BYTES,
    workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> Quantized:
    """Quantise every matrix of the routed experts; copy all else, vision tensors and tokenizer files included.

    `workers` matrices are in memory at once. The scale rule and the rounding are those of `int4.quantize`.

    Raises:
        KdjaxError: the source is INT4 already or not what its config describes, `group_size` divides a width unevenly,
            a weight is not finite, or the folder holds weights or lacks room.
    """
    source, folder = pathlib.Path(source), pathlib.Path(folder)
    config = read_model_config(source)
    if config.experts_int4 is not None:
        raise KdjaxError(f"{source} is INT4 already (quantization_config in config.json): give the bf16 checkpoint")
    form = Int4Config(group_size=group_size)
    leaves = list(target_leaves(config, lambda module: None))
    TensorFolder(source, prefix=WRAPPER_PREFIX, skip=VISION, expected=expected_tensors(leaves))
    experts = [leaf for leaf in target_leaves(config, lambda module: form) if leaf.int4]
    packed = {f"{module}.weight": leaf for leaf in experts for module in leaf.modules}

    files = TensorFolder(source)
    tensors: dict[str, Stored] = {}
    jobs: list[Job] = []
    for name, stored in files.tensors.items():
        if leaf := packed.get(name.removeprefix(WRAPPER_PREFIX)):
            tensors |= leaf.tensors(name.removesuffix(".weight"))
            jobs.append(functools.partial(_quantize, files, name, leaf, rule))
        else:
            tensors[name] = stored
            jobs.append(functools.partial(_copy, files, name))
    write_folder(folder, by_size(tensors, max_shard_bytes), jobs, workers=workers, progress=progress)

    for file in source.iterdir():
        if file.is_file() and file.name != "config.json" and ".safetensors" not in file.suffixes:
            shutil.copyfile(file, folder / file.name)
    whole = json.loads((source / "config.json").read_text(encoding="utf-8"))
    ignore = (*IGNORE, *(f"re:{prefix.removesuffix('.')}.*" for prefix in VISION))
    whole.get("text_config", whole)["quantization_config"] = quantization_json(form, ignore)
    write_text(folder / "config.json", json.dumps(whole, indent=1) + "\n")
    return Quantized(
        matrices=len(packed),
        copied=len(jobs) - len(packed),
        bytes_before=sum(stored.nbytes for stored in files.tensors.values()),
        bytes_after=sum(stored.nbytes for stored in tensors.values()),
    )


def _copy(files: TensorFolder, name: str) -> list[tuple[str, np.ndarray]]:
    return [(name, files.read(name))]


def _quantize(files: TensorFolder, name: str, leaf: Leaf, rule: int4.ScaleRule) -> Iterator[tuple[str, np.ndarray]]:
    assert leaf.int4 is not None
    try:
        codes, scale = int4.quantize(files.read(name), leaf.int4.group_size, rule)
    except KdjaxError as error:
        raise KdjaxError(f"{files.folder}: {name}: {error}") from None
    module = name.removesuffix(".weight")
    yield f"{module}.weight_packed", int4.pack(codes)
    yield f"{module}.weight_scale", scale
    yield f"{module}.weight_shape", np.array(leaf.shape, np.int32)
