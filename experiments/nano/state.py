"""Pytrees of arrays in safetensors files: training state, frozen weights, and their parts."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
from safetensors.numpy import load_file, save_file


def _name(path: tuple) -> str:
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def save_tree(path: pathlib.Path, tree: Any, *, max_bytes: int | None = None) -> list[pathlib.Path]:
    """Writes `tree` atomically as `path` or, where it exceeds `max_bytes`, as numbered parts beside it."""
    leaves = {_name(p): np.asarray(x, order="C") for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
    parts: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, leaf in leaves.items():
        if max_bytes is not None and size + leaf.nbytes > max_bytes and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = leaf
        size += leaf.nbytes
    files = []
    for i, part in enumerate(parts):
        file = path if len(parts) == 1 else path.with_suffix(f".{i}{path.suffix}")
        temporary = file.with_suffix(".tmp")
        save_file(part, temporary)
        temporary.replace(file)
        files.append(file)
    return files


def load_flat(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All leaves of a tree saved by `save_tree`, whole or in parts, by their path."""
    files = [path] if path.exists() else sorted(path.parent.glob(f"{path.stem}.*{path.suffix}"))
    if not files:
        raise FileNotFoundError(f"neither {path} nor its parts exist")
    return {name: leaf for file in files for name, leaf in load_file(file).items()}


def load_tree(path: pathlib.Path, like: Any) -> Any:
    """Restores a tree with the structure of `like`."""
    flat = load_flat(path)
    return jax.tree_util.tree_map_with_path(lambda p, _: flat[_name(p)], like)


def load_dict(path: pathlib.Path) -> dict[Any, Any]:
    """Restores a nested dict; numeric path elements become integer keys (layer numbers)."""
    out: dict[Any, Any] = {}
    for name, leaf in load_flat(path).items():
        *parents, last = [int(k) if k.isdigit() else k for k in name.split("/")]
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return out
