"""Rules from the path of an array to its PartitionSpec, applied strictly."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdjax.config import MeshConfig
from kdjax.config.mesh import Axes
from kdjax.errors import KdjaxError
from kdjax.model.int4 import Int4


class Split(NamedTuple):
    """One dimension cut into equal parts over mesh axes. `unit` neighbouring indices are a `whole` that no cut divides,
    such as the rows of a head."""

    axes: Axes
    unit: int = 1
    whole: str = "index"


class Rule(NamedTuple):
    """`pattern` is a dotted path in which `*` stands for any one name; `dims` are its leading dimensions, None or a
    `Split` without axes is not cut."""

    pattern: str
    dims: tuple[Split | None, ...] = ()

    def matches(self, path: str) -> bool:
        """Whether the rule is about the array at this dotted path."""
        return re.fullmatch(re.escape(self.pattern).replace(r"\*", r"[^.]+"), path) is not None


def dotted(path: Sequence[Any]) -> str:
    """`layers.0.mlp.gate.weight` of a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def partition(tree: Any, rules: Sequence[Rule], mesh: MeshConfig) -> Any:
    """The PartitionSpec of every array of `tree` (arrays or shape structs); the first rule that matches wins.

    An `Int4` counts as one matrix of its logical shape, so that words and scales are cut at the same columns.

    Raises:
        KdjaxError: a path that no rule matches, a rule that no path needs, or dimensions that cannot be cut evenly.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, Int4))
    used, specs, problems = set(), [], []
    for keys, leaf in leaves:
        path = dotted(keys)
        rule = next((rule for rule in rules if rule.matches(path)), None)
        if rule is None:
            raise KdjaxError(f"no sharding rule matches {path}: add one to the table of its model")
        used.add(rule.pattern)
        spec = PartitionSpec(*(split.axes or None if split else None for split in rule.dims))
        shape = leaf.packed.shape[:-1] + (leaf.columns,) if isinstance(leaf, Int4) else leaf.shape
        if isinstance(leaf, Int4):
            spec = dataclasses.replace(leaf, packed=spec, scale=spec)
        problems += _uncuttable(path, shape, rule, mesh)
        specs.append(spec)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise KdjaxError(problems[0] + more)
    if unused := [rule.pattern for rule in rules if rule.pattern not in used]:
        raise KdjaxError(f"sharding rule {unused[0]} matches nothing or comes after one that takes all: remove it")
    return jax.tree_util.tree_unflatten(structure, specs)


def _uncuttable(path: str, shape: tuple[int, ...], rule: Rule, mesh: MeshConfig) -> list[str]:
    found = []
    for dim, split in enumerate(rule.dims):
        parts = 1 if split is None else mesh.size(split.axes)
        if parts == 1 or split is None or shape[dim] % (parts * split.unit) == 0:
            continue
        count = f"{shape[dim] / split.unit:g} {'indices' if split.unit == 1 else split.whole + 's'}"
        found.append(
            f"{path} {list(shape)} cannot be cut into {parts} parts along dimension {dim}, which holds {count}: "
            f"choose another {' * '.join(split.axes)} in the mesh"
        )
    return found


def share(tree: Any, specs: Any, mesh: MeshConfig) -> Any:
    """The shape structs of the part that one device of `mesh` holds of `tree` (arrays or shape structs)."""

    def part(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        cuts = [mesh.size((axes,) if isinstance(axes, str) else axes or ()) for axes in spec]
        cuts += [1] * (len(leaf.shape) - len(cuts))
        return jax.ShapeDtypeStruct(tuple(n // cut for n, cut in zip(leaf.shape, cuts, strict=True)), leaf.dtype)

    return jax.tree.map(part, tree, specs)


def shardings(specs: Any, mesh: Mesh) -> Any:
    """The same tree of `NamedSharding`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )


def place(tree: Any, shardings: Any) -> Any:
    """The arrays of `tree` where `shardings` say; what lies there already is not copied.

    Over several processes, each must hold the same whole arrays, or parts that lie right already.
    """

    def put(array: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable or getattr(array, "sharding", None) == sharding:
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)

    return jax.tree.map(put, tree, shardings)
