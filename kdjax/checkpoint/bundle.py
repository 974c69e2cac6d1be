"""Golden bundles: weights, prompts, and the tokens that the NumPy reference decodes from them, in one safetensors file.

The format is described in docs/guides/bundle.md.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from kdjax.checkpoint.files import Located, Source, TensorFolder
from kdjax.checkpoint.header import BadHeader, read_header
from kdjax.checkpoint.hf_config import (
    IGNORE,
    read_drafter_config,
    read_model_config,
    read_quantization,
    write_drafter_config,
    write_model_config,
)
from kdjax.checkpoint.layout import DTYPES, Leaf, Stored, drafter_leaves, is_ignored, target_leaves
from kdjax.checkpoint.params import expected_tensors
from kdjax.checkpoint.target import VISION, WRAPPER_PREFIX
from kdjax.checkpoint.writer import Job, SafetensorsFile, by_size, write_folder
from kdjax.config import DrafterConfig, Int4Config, ModelConfig, ModelPair
from kdjax.errors import KdjaxError
from kdjax.reference import int4

FORMAT, VERSION = "kdjax-bundle", "1"
PACKED, SCALE = "qw", "sc"

Weights = Literal["stored", "dense"]


class Case(NamedTuple):
    """Greedy decoding of one prompt: tokens one by one with the gap between the two best logits, and by trees.

    `tree_accepted` has the rows that each verify round committed, the root included, up to the round that reached the
    length of `tree_tokens`. Both are empty in a bundle without a drafter.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    tree_tokens: tuple[int, ...] = ()
    tree_accepted: tuple[int, ...] = ()

    def arrays(self) -> dict[str, np.ndarray]:
        """As the bundle stores them, by the last part of the tensor's name."""
        return {
            "prompt": np.array(self.prompt, np.int32),
            "autoregressive.tokens": np.array(self.tokens, np.int32),
            "autoregressive.margins": np.array(self.margins, np.float64),
            "tree.tokens": np.array(self.tree_tokens, np.int32),
            "tree.accepted": np.array(self.tree_accepted, np.int32),
        }


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metadata of a bundle, as one JSON text. `tree_budget` counts tree nodes without the root."""

    target: ModelConfig
    drafter: DrafterConfig | None
    tree_budget: int
    cases: int


def write_bundle(
    path: str | pathlib.Path,
    target: str | pathlib.Path,
    drafter: str | pathlib.Path | None,
    cases: Sequence[Case],
    *,
    tree_budget: int,
    weights: Weights = "stored",
) -> None:
    """Pack the weights of two checkpoint folders and the cases decoded from them.

    `weights` "dense" expands INT4 experts to bfloat16, as compressed-tensors does.

    Raises:
        KdjaxError: a folder is not what its config describes, or the file exists.
    """
    path, target = pathlib.Path(path), pathlib.Path(target)
    if path.exists():
        raise KdjaxError(f"{path} exists: give another name or remove it")
    config = read_model_config(target)
    quantization = read_quantization(target)

    def int4_of(module: str) -> Int4Config | None:
        return None if quantization is None or is_ignored(module, quantization.ignore) else quantization.int4

    leaves = list(target_leaves(config, int4_of))
    files = TensorFolder(target, prefix=WRAPPER_PREFIX, skip=VISION, expected=expected_tensors(leaves))
    tensors: dict[str, Stored] = {}
    jobs: list[Job] = []

    def put(name: str, value: Stored, read: Any) -> None:
        tensors[name] = value
        jobs.append(lambda: [(name, read())])

    for leaf in leaves:
        for module in leaf.modules:
            name = f"target.{module}.weight"
            stored = [files.tensors[tensor] for tensor in leaf.tensors(module)]
            if leaf.int4 is None:
                (tensor,) = leaf.tensors(module)
                put(f"target.{tensor}", stored[0], functools.partial(files.read, tensor))
            elif weights == "dense":
                put(name, Stored(leaf.shape, ("BF16",)), functools.partial(_dense, files, module, leaf))
            else:
                put(f"{name}.{PACKED}", stored[0], functools.partial(files.read, f"{module}.weight_packed"))
                put(f"{name}.{SCALE}", stored[1], functools.partial(files.read, f"{module}.weight_scale"))
    if weights == "dense":
        config = msgspec.structs.replace(config, experts_int4=None)
    draft_config = None
    if drafter is not None:
        draft_config = read_drafter_config(drafter)
        ModelPair(target=config, drafter=draft_config)
        draft_files = TensorFolder(drafter, expected=expected_tensors(list(drafter_leaves(draft_config))))
        for tensor, stored in draft_files.tensors.items():
            put(f"drafter.{tensor}", stored, functools.partial(draft_files.read, tensor))
    for index, case in enumerate(cases):
        for key, value in case.arrays().items():
            dtype = {np.dtype(np.int32): "I32", np.dtype(np.float64): "F64"}[value.dtype]
            put(f"case.{index}.{key}", Stored(value.shape, (dtype,)), lambda value=value: value)

    header = Header(target=config, drafter=draft_config, tree_budget=tree_budget, cases=len(cases))
    metadata = {"format": FORMAT, "version": VERSION, "header": msgspec.json.encode(header).decode()}
    path.parent.mkdir(parents=True, exist_ok=True)
    file = SafetensorsFile(path, tensors, metadata)
    try:
        for job in jobs:
            for name, value in job():
                file.write(name, value)
        file.finish()
    except BaseException:
        file.discard()
        raise


def _dense(files: TensorFolder, module: str, leaf: Leaf) -> np.ndarray:
    assert leaf.int4 is not None
    packed, scale = files.read(f"{module}.weight_packed"), files.read(f"{module}.weight_scale")
    return int4.dequantise(packed, scale, leaf.shape[1], leaf.int4.group_size).astype(ml_dtypes.bfloat16)


class Bundle:
    """An open bundle. Weights stay in the file until `extract`.

    Raises:
        KdjaxError: no bundle, one of another version, or one that is damaged.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        try:
            with safe_open(self.path, framework="np") as file:
                metadata = file.metadata() or {}
            self._entries, self._source = read_header(self.path), Source(self.path)
        except (BadHeader, SafetensorError, OSError) as error:
            raise KdjaxError(f"{path} is not a readable safetensors file ({error}): make it again") from None
        if (kind := (metadata.get("format"), metadata.get("version"))) != (FORMAT, VERSION):
            raise KdjaxError(f"{path} is {kind[0]} version {kind[1]}, not {FORMAT} version {VERSION}: make it again")
        try:
            self.header = msgspec.json.decode(metadata.get("header", ""), type=Header)
        except msgspec.DecodeError as error:
            raise KdjaxError(f"{path} has a damaged header ({error}): make it again") from None
        self.cases = [self._case(index) for index in range(self.header.cases)]

    def extract(self, folder: str | pathlib.Path) -> tuple[pathlib.Path, pathlib.Path | None]:
        """Write the checkpoint folders `target` and, where the bundle has one, `drafter`; the loaders read those.

        A matrix NAME is INT4 where the bundle has `NAME.qw`, else dense.

        Raises:
            KdjaxError: weights are missing or of another shape than the config says, or `folder` holds weights.
        """
        config, folder = self.header.target, pathlib.Path(folder)
        dense: set[str] = set()

        def int4_of(module: str) -> Int4Config | None:
            if f"target.{module}.weight.{PACKED}" in self._entries:
                if config.experts_int4 is None:
                    raise KdjaxError(f"{self.path}: {module} is INT4, its config has no experts_int4: make it again")
                return config.experts_int4
            dense.add(module)
            return None

        leaves = list(target_leaves(config, int4_of))
        self._write(folder / "target", "target", leaves)
        write_model_config(folder / "target", config, ignore=(*IGNORE, *sorted(dense)))
        if self.header.drafter is None:
            return folder / "target", None
        self._write(folder / "drafter", "drafter", list(drafter_leaves(self.header.drafter)))
        write_drafter_config(folder / "drafter", self.header.drafter)
        return folder / "target", folder / "drafter"

    def _write(self, folder: pathlib.Path, role: str, leaves: list[Leaf]) -> None:
        tensors: dict[str, Stored] = {}
        jobs: list[Job] = []
        for leaf in leaves:
            for module in leaf.modules:
                for name, stored in leaf.tensors(module).items():
                    source = f"{role}.{name}".replace("weight_packed", f"weight.{PACKED}")
                    source = source.replace("weight_scale", f"weight.{SCALE}")
                    if name.endswith("weight_shape"):
                        tensors[name] = stored
                        jobs.append(lambda name=name, leaf=leaf: [(name, np.array(leaf.shape, np.int32))])
                        continue
                    tensors[name] = self._stored(source, stored)
                    jobs.append(lambda name=name, source=source: [(name, self._read(source))])
        write_folder(folder, by_size(tensors, None), jobs)

    def _stored(self, name: str, expected: Stored) -> Stored:
        if name not in self._entries:
            raise KdjaxError(f"{self.path} lacks {name}: make it again")
        entry = self._entries[name]
        found = Stored(entry.shape, (entry.dtype,))
        if found.shape != expected.shape or found.dtypes[0] not in expected.dtypes:
            raise KdjaxError(
                f"{self.path}: {name} is {found.dtypes[0]} {list(found.shape)}, its config says "
                f"{' or '.join(expected.dtypes)} {list(expected.shape)}: make it again"
            )
        return found

    def _read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        out = np.empty(entry.shape, DTYPES[entry.dtype])
        self._source.read_into(Located(self.path, name, entry), out)
        return out

    def _case(self, index: int) -> Case:
        names = [f"case.{index}.{key}" for key in Case((), (), ()).arrays()]
        if missing := [name for name in names if name not in self._entries]:
            raise KdjaxError(f"{self.path} lacks {missing[0]}: make it again")
        return Case(*(tuple(self._read(name).tolist()) for name in names))
