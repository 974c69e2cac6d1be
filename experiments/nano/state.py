"""Pytrees of arrays in safetensors files: training state and frozen weights."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
from safetensors.numpy import load_file, save_file


def _name(path: tuple) -> str:
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def save_tree(path: pathlib.Path, tree: Any) -> None:
    """Writes `tree` whole or not at all: a run may be killed while it writes."""
    leaves = {_name(p): np.asarray(x, order="C") for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
    temporary = path.with_suffix(".tmp")
    save_file(leaves, temporary)
    temporary.replace(path)


def load_tree(path: pathlib.Path, like: Any) -> Any:
    """Restores a tree with the structure of `like`."""
    flat = load_file(path)
    return jax.tree_util.tree_map_with_path(lambda p, _: flat[_name(p)], like)


def load_dict(path: pathlib.Path) -> dict[Any, Any]:
    """Restores a nested dict; numeric path elements become integer keys (layer numbers)."""
    out: dict[Any, Any] = {}
    for name, leaf in load_file(path).items():
        *parents, last = [int(k) if k.isdigit() else k for k in name.split("/")]
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return out
