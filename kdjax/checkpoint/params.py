"""Between tensors on disk and the nested params of the models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kdjax.checkpoint.files import TensorFolder
from kdjax.checkpoint.layout import Leaf, Stored
from kdjax.errors import KdjaxError
from kdjax.model.experts import place_experts
from kdjax.model.int4 import Int4
from kdjax.model.runtime import Runtime

Params = dict[str, Any]

# One program per shape instead of a dozen eager ones: compiling those dominated the start of a small model.
_place = jax.jit(place_experts, static_argnums=1)


def expected_tensors(leaves: Sequence[Leaf], prefix: str = "") -> dict[str, Stored]:
    """Every tensor of the checkpoint, in the order of `leaves`."""
    return {
        prefix + name: stored
        for leaf in leaves
        for module in leaf.modules
        for name, stored in leaf.tensors(module).items()
    }


def _gather(files: TensorFolder, leaf: Leaf, suffix: str) -> np.ndarray:
    if not leaf.stacked:
        return files.read(leaf.modules[0] + suffix)
    first = files.read(leaf.modules[0] + suffix)
    # Filled in place: a layer of routed experts is gigabytes, and np.stack would hold it twice.
    out = np.empty((len(leaf.modules), *first.shape), first.dtype)
    for i, module in enumerate(leaf.modules):
        out[i] = files.read(module + suffix)
    return out


def _load_leaf(files: TensorFolder, leaf: Leaf, runtime: Runtime) -> jax.Array | Int4:
    if leaf.bias:
        return jnp.asarray(_gather(files, leaf, ".e_score_correction_bias"))
    if leaf.int4 is None:
        return jnp.asarray(_gather(files, leaf, ".weight").astype(runtime.dtype))
    for module in leaf.modules:
        shape = tuple(files.read(f"{module}.weight_shape").tolist())
        if shape != leaf.shape:
            raise KdjaxError(
                f"{files.folder}: {module}.weight_shape says {list(shape)}, config.json {list(leaf.shape)}: "
                "use config.json and weights of one revision"
            )
    weight = Int4(
        packed=jnp.asarray(_gather(files, leaf, ".weight_packed").view(np.uint32)),
        scale=jnp.asarray(_gather(files, leaf, ".weight_scale")),
        columns=leaf.shape[1],
        group_size=leaf.int4.group_size,
    )
    return _place(weight, runtime)


def load_params(files: TensorFolder, leaves: Sequence[Leaf], runtime: Runtime) -> Params:
    """The nested params: plain weights in `runtime.compute_dtype`, the router's bias in float32, and INT4
    as `runtime.expert_weights` says.

    Raises:
        KdjaxError: tensors are missing, unexpected, or of another shape or dtype than `leaves` say (all in one error).
    """
    files.check(expected_tensors(leaves))
    params: Params = {}
    for leaf in leaves:
        node: dict[Any, Any] = params
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        node[leaf.path[-1]] = _load_leaf(files, leaf, runtime)
    return params


def _flatten(params: Params) -> dict[tuple[str | int, ...], Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda node: isinstance(node, Int4))
    return {tuple(key.key for key in path): value for path, value in flat}


def _dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))


def _check_params(flat: dict[tuple[str | int, ...], Any], leaves: Sequence[Leaf]) -> None:
    expected = {leaf.path for leaf in leaves}
    if missing := sorted(_dotted(path) for path in expected - flat.keys()):
        raise KdjaxError(f"params lack {len(missing)} weights of their config ({', '.join(missing[:6])}): add them")
    if extra := sorted(_dotted(path) for path in flat.keys() - expected):
        raise KdjaxError(
            f"params have {len(extra)} weights that their config lacks ({', '.join(extra[:6])}): drop them"
        )
    for leaf in leaves:
        value, shape = flat[leaf.path], leaf.shape
        if isinstance(value, Int4) != (leaf.int4 is not None):
            raise KdjaxError(
                f"{_dotted(leaf.path)} is {type(value).__name__} but experts_int4={leaf.int4}: "
                "encode the experts or change the config"
            )
        if isinstance(value, Int4):
            rows, columns = shape
            group_size = None if leaf.int4 is None else leaf.int4.group_size
            if (value.columns, value.group_size) != (columns, group_size):
                raise KdjaxError(
                    f"{_dotted(leaf.path)} has {value.columns} columns in groups of {value.group_size}, its config "
                    f"{columns} in groups of {group_size}: encode it for this config"
                )
            value, shape = value.packed, (rows, -(-columns // 8))
        shape = (len(leaf.modules), *shape) if leaf.stacked else shape
        if tuple(value.shape) != shape:
            raise KdjaxError(f"{_dotted(leaf.path)} is {list(value.shape)}, its config says {list(shape)}: fix either")


class ParamReader:
    """The inverse of `load_params`: the tensors of a checkpoint, one at a time, from nested params.

    Plain weights are rounded to bfloat16, the storage of the published checkpoints.

    Raises:
        KdjaxError: params and leaves do not describe the same model.
    """

    def __init__(self, params: Params, leaves: Sequence[Leaf], prefix: str = ""):
        self._flat = _flatten(params)
        _check_params(self._flat, leaves)
        self._where = {
            prefix + name: (leaf, i)
            for leaf in leaves
            for i, module in enumerate(leaf.modules)
            for name in leaf.tensors(module)
        }
        # One stack of experts at a time on the host, however many tensors it is written as.
        self._on_host = functools.lru_cache(maxsize=1)(lambda path: jax.device_get(jax.tree.leaves(self._flat[path])))

    def jobs(self) -> Iterator[Callable[[], list[tuple[str, np.ndarray]]]]:
        """What `write_folder` takes: one job per tensor."""
        for name in self._where:
            yield lambda name=name: [(name, self.read(name))]

    def read(self, name: str) -> np.ndarray:
        leaf, i = self._where[name]
        arrays = self._on_host(leaf.path)
        part = name.rpartition(".")[2]
        if part == "weight_shape":
            return np.array(leaf.shape, np.int32)
        if leaf.int4 is not None:
            packed, scale = arrays
            return packed[i].view(np.int32) if part == "weight_packed" else scale[i]
        (value,) = arrays
        value = value[i] if leaf.stacked else value
        return value.astype(np.float32 if leaf.bias else ml_dtypes.bfloat16)
