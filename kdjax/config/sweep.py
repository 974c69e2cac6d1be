"""One TOML file -> the cells of a sweep: a list where one value belongs is an axis, and the cells are the product."""

from __future__ import annotations

import collections
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tomli_w

from kdjax.config.generate import RuntimeSection
from kdjax.config.mesh import ONE_DEVICE, MeshConfig
from kdjax.config.strict import Document, Key, check_keys, struct_of, type_at, without_none
from kdjax.errors import KdjaxError

VERBS = {"experiment": "run", "evaluation": "eval"}
"""Keys that name what a file is for, with the verb that runs it."""


class Cell(NamedTuple):
    """One point of a sweep. `name` gives the swept keys and their values, such as `mode=tree budget=7`."""

    name: str
    config: Any
    """A Struct of the type that the file's kind of study has."""


class Sweep(NamedTuple):
    """The cells in their order, and the resolved file: `read_sweep` of `document` gives the same cells."""

    name: str
    """What runs: the value of the file's key `experiment` or `evaluation`."""
    cells: tuple[Cell, ...]
    document: dict[str, Any]

    @property
    def toml(self) -> str:
        """`document` as TOML, after comments on what its cells leave to the device."""
        open_keys: dict[str, dict[str, None]] = {}
        for at, section, _ in (found for cell in self.cells for found in runtimes(cell.config)):
            if section.left_open:
                open_keys.setdefault(".".join(at), {}).update(dict.fromkeys(section.left_open))
        comments = (
            f"# what a cell leaves out of [{section}] is chosen by the device: {', '.join(keys)}\n"
            for section, keys in open_keys.items()
        )
        return "".join(comments) + tomli_w.dumps(self.document)


def read_sweep(
    file: Path,
    overrides: Sequence[str] = (),
    *,
    kind_of: Callable[[str], type[msgspec.Struct]],
    key: str = "experiment",
    smoke: bool = False,
) -> Sweep:
    """The sweep of a file. `kind_of` maps the value of its key `key` to the type of one cell.

    A list given for a key that holds one value makes an axis (for a key that holds a list: a list of lists). Each table
    of `[[cells]]` changes keys for a sweep of its own, so that cells can be listed one by one; an empty table is the
    sweep of the file itself. `[smoke]` changes keys where `smoke` is asked for. Overrides come last and win over both,
    but a table of `[[cells]]` keeps its own keys.

    Raises KdjaxError as `load` does, and where an axis is empty, two cells are the same or an override changes nothing.
    """
    document = Document.read(file, lambda tables: isinstance(tables.get(key), str))
    small = document.data.pop("smoke", {})
    _need(isinstance(small, dict), f"{file}: smoke must be a table of the keys that make the run small")
    if smoke:
        document.data = merge(document.data, small)
    for text in overrides:
        document.override(text)
    name = document.data.pop(key, "")
    other = next((k for k in VERBS if k in document.data), key)
    _need(name or other == key, f"{file}: it names an {other}: use kdjax {VERBS[other]}")
    _need(isinstance(name, str) and name, f"{file}: no {key} is named: add {key} = NAME")
    kind = kind_of(name)
    entries = document.data.pop("cells", None) or [{}]
    tables = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    _need(tables, f"{file}: cells must be tables: write [[cells]] above each")
    for path, source in document.sources.items():
        hidden = all(path in dict(leaves(entry)) for entry in entries)
        dotted = ".".join(path)
        _need(not hidden, f"{source}: every table of [[cells]] sets {dotted}: leave them out by --set 'cells=[]'")
    if not smoke:
        check_keys(kind, {k: value for k, value in small.items() if k != "cells"}, ("smoke",), document.source)

    points = []
    for entry in entries:
        tables = merge(document.data, entry)
        axes = _axes(kind, tables)
        if empty := [axis for axis, values in axes.items() if not values]:
            raise KdjaxError(f"{document.source(empty[0])}: {'.'.join(empty[0])} = []: give at least one value")
        listed = {path: value for path, value in leaves(entry) if path not in axes}
        for values in itertools.product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            points.append((_in_order(kind, listed | point), document.convert(kind, put(tables, point))))
    names = _names([point for point, _ in points])
    cells = tuple(Cell(cell, config) for cell, (_, config) in zip(names, points, strict=True))
    twins = [cell for cell, count in collections.Counter(cell.name for cell in cells).items() if count > 1]
    _need(not twins, f"{file}: the sweep has {twins[:1]} twice: drop one")
    return Sweep(name, cells, {key: name} | _resolved(document.data, entries, kind, cells[0].config))


def merge(tables: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`tables` with the values of `changes` put over them, table by table."""
    merged = dict(tables)
    for key, value in changes.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def put(tables: dict[str, Any], values: Mapping[Key, Any]) -> dict[str, Any]:
    """`tables` with each key of `values` set."""
    for key, value in values.items():
        for part in reversed(key):
            value = {part: value}
        tables = merge(tables, value)
    return tables


def _resolved(
    base: dict[str, Any], entries: list[dict[str, Any]], kind: type[msgspec.Struct], first: msgspec.Struct
) -> dict[str, Any]:
    """`base` with the defaults of all keys that it leaves out, and the entries as they were given."""
    listed = {key for entry in entries for key, _ in leaves(entry)}
    given = dict(leaves(base))
    filled: dict[str, Any] = {}
    for key, value in leaves(without_none(msgspec.to_builtins(first))):
        if key in given or key not in listed:
            filled = put(filled, {key: given.get(key, value)})
    return filled | ({"cells": entries} if listed else {})


def runtimes(
    config: msgspec.Struct, at: Key = (), mesh: MeshConfig = ONE_DEVICE
) -> Iterator[tuple[Key, RuntimeSection, MeshConfig]]:
    """Key of each section that leaves settings to the device, the section, and the mesh that it is for."""
    mesh = getattr(config, "mesh", mesh)
    if isinstance(config, RuntimeSection):
        yield at, config, mesh
    for name in config.__struct_fields__:
        if isinstance(inner := getattr(config, name), msgspec.Struct):
            yield from runtimes(inner, (*at, name), mesh)


def _axes(kind: type[msgspec.Struct], tables: dict[str, Any]) -> dict[Key, list[Any]]:
    axes = {}
    for key, value in leaves(tables):
        if isinstance(value, list) and (not _is_sequence(type_at(kind, key)) or _all_lists(value)):
            axes[key] = value
    return _in_order(kind, axes)


def _in_order(kind: type[msgspec.Struct], values: dict[Key, Any]) -> dict[Key, Any]:
    """By the fields of the type: names do not depend on how a file is laid out, which TOML does not keep."""

    def place(key: Key) -> list[int]:
        at: Any = kind
        places = []
        for part in key:
            names = [field.encode_name for field in msgspec.structs.fields(at)] if at else []
            places.append(names.index(part) if part in names else len(names))
            at = struct_of(type_at(at, (part,))) if at else None
        return places

    return dict(sorted(values.items(), key=lambda item: place(item[0])))


def _all_lists(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(item, list) for item in value)


def _is_sequence(kind: Any) -> bool:
    options = (kind, *typing.get_args(kind))
    return any((typing.get_origin(option) or option) in (tuple, list) for option in options)


def leaves(tables: Mapping[str, Any], at: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every value that is no table, with its key."""
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from leaves(value, (*at, key))
        else:
            yield (*at, key), value


def _names(points: Sequence[Mapping[Key, Any]]) -> list[str]:
    """Keys by their last part where that says which one is meant."""
    keys = {key for point in points for key in point}
    last = collections.Counter(key[-1] for key in keys)

    def label(key: Key) -> str:
        return key[-1] if last[key[-1]] == 1 else ".".join(key)

    return [" ".join(f"{label(key)}={_said(value)}" for key, value in point.items()) or "all" for point in points]


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "+".join(map(_said, value)) if isinstance(value, list) else str(value)


def _need(condition: object, message: str) -> None:
    if not condition:
        raise KdjaxError(message)
