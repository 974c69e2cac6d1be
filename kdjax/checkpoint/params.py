"""Between tensors on disk and the nested params of the models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, Sharding

from kdjax.checkpoint.files import TensorFolder, listed
from kdjax.checkpoint.layout import DTYPES, Leaf, Stored
from kdjax.checkpoint.progress import Monitor
from kdjax.checkpoint.stream import Part, stream
from kdjax.checkpoint.values import check_scales, check_weights
from kdjax.errors import KdjaxError
from kdjax.model.experts import place_experts
from kdjax.model.int4 import Int4
from kdjax.model.runtime import Runtime

Params = dict[str, Any]


def expected_tensors(leaves: Sequence[Leaf], prefix: str = "") -> dict[str, Stored]:
    """Every tensor of the checkpoint, in the order of `leaves`."""
    return {
        prefix + name: stored
        for leaf in leaves
        for module in leaf.modules
        for name, stored in leaf.tensors(module).items()
    }


def _at(tree: Any, path: tuple[str | int, ...]) -> Any:
    return functools.reduce(lambda node, key: node[key], path, tree)


def _parts(files: TensorFolder, leaf: Leaf, runtime: Runtime, sharding: Any) -> list[Part]:
    """The arrays that `leaf` is loaded as: one, or words and scales."""

    def part(suffix: str, dtype: np.dtype | None, sharding: Sharding, check: Any) -> Part:
        names = tuple(f"{module}.{suffix}" for module in leaf.modules)
        tensor = files.tensors[names[0]]
        shape = (len(names), *tensor.shape) if leaf.stacked else tensor.shape
        # int32 is what the words are stored as; what they hold are eight unsigned nibbles.
        stored = np.dtype(np.uint32) if suffix == "weight_packed" else DTYPES[tensor.dtypes[0]]
        return Part(names, leaf.stacked, shape, stored, dtype or stored, sharding, check)

    if leaf.int4 is None:
        dense = sharding.packed if isinstance(sharding, Int4) else sharding
        if leaf.bias:
            return [part("e_score_correction_bias", None, dense, check_weights)]
        return [part("weight", np.dtype(runtime.dtype), dense, check_weights)]
    packed, scale = (sharding.packed, sharding.scale) if isinstance(sharding, Int4) else (sharding, sharding)
    return [part("weight_packed", None, packed, None), part("weight_scale", None, scale, check_scales)]


def _uncuttable(leaf: Leaf, parts: Sequence[Part]) -> list[str]:
    """Why the shardings do not fit, if they do not."""
    for part in parts:
        try:
            part.sharding.shard_shape(part.shape)
        except ValueError:
            what = f"{part.names[0]} {list(part.shape)}"
            if isinstance(part.sharding, NamedSharding):
                mesh = ", ".join(f"{axis}={size}" for axis, size in part.sharding.mesh.shape.items())
                return [f"{what} cannot be cut evenly as {part.sharding.spec} over the mesh {mesh}"]
            return [f"{what} cannot be cut evenly by {part.sharding}"]
    if leaf.int4 is None:
        return []
    (*lead, words), (*scale_lead, groups) = (part.sharding.shard_shape(part.shape) for part in parts)
    if lead != scale_lead or words * 8 != groups * leaf.int4.group_size:
        return [
            f"{parts[0].names[0]} would be cut into {[*lead, words * 8]} and its scales into those of "
            f"{[*scale_lead, groups * leaf.int4.group_size]}: a scale must lie where its group of weights is"
        ]
    return []


@functools.partial(jax.jit, static_argnums=(1, 2))
def _place(weight: Int4, runtime: Runtime, sharding: Sharding) -> Any:
    """On the shard that owns it. One program per shape: compiling a dozen eager ones dominated small models."""
    place = functools.partial(place_experts, runtime=runtime)
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        place = jax.shard_map(place, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return place(weight)


def _assemble(leaf: Leaf, arrays: Sequence[jax.Array], runtime: Runtime) -> Any:
    if leaf.int4 is None:
        return arrays[0]
    packed, scale = arrays
    if runtime.expert_weights == "packed":
        return Int4(packed, scale, leaf.shape[1], leaf.int4.group_size)
    # Of one shard.
    columns = min(leaf.shape[1], packed.sharding.shard_shape(packed.shape)[-1] * 8)
    return _place(Int4(packed, scale, columns, leaf.int4.group_size), runtime, packed.sharding)


def load_params(
    files: TensorFolder,
    leaves: Sequence[Leaf],
    runtime: Runtime,
    *,
    shardings: Any = None,
    finish_layer: Callable[[Params], None] = lambda layer: None,
    monitor: Monitor | None = None,
) -> Params:
    """The nested params: plain weights in `runtime.compute_dtype`, the router's bias in float32, and INT4
    as `runtime.expert_weights` says.

    `files` must have been opened with `expected_tensors(leaves)`. `shardings` is a tree like the params of
    `jax.sharding.Sharding` (an `Int4` of two for INT4 matrices); None puts everything on JAX's default device.
    `finish_layer` changes the params of a layer in place as soon as they are complete, while the next are read.

    Raises:
        KdjaxError: arrays that their sharding does not cut evenly, all in one error, before any device memory is taken;
            scales or weights that no quantiser or training could have written.
    """
    monitor = monitor or Monitor()
    here = jax.device_put(0).sharding
    of_leaf = [
        _parts(files, leaf, runtime, here if shardings is None else _at(shardings, leaf.path)) for leaf in leaves
    ]
    if problems := [p for leaf, parts in zip(leaves, of_leaf, strict=True) for p in _uncuttable(leaf, parts)]:
        raise KdjaxError(f"{files.folder} cannot be split over the mesh: {listed(problems)}: choose another mesh")
    params: Params = {}
    monitor.begin(sum(part.nbytes for parts in of_leaf for part in parts))
    arrays = stream(files, [part for parts in of_leaf for part in parts], monitor)
    last = {leaf.path[:2]: leaf for leaf in leaves if leaf.path[0] == "layers"}
    for leaf, parts in zip(leaves, of_leaf, strict=True):
        made = [next(arrays) for _ in parts]
        with monitor.arranging():
            node: dict[Any, Any] = params
            for key in leaf.path[:-1]:
                node = node.setdefault(key, {})
            node[leaf.path[-1]] = _assemble(leaf, made, runtime)
            # What only the params hold can be freed as the layer is changed.
            del made
            if last.get(leaf.path[:2]) is leaf:
                finish_layer(_at(params, leaf.path[:2]))
                jax.block_until_ready(_at(params, leaf.path[:2]))
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
