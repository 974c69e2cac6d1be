"""TOML files and `--set` overrides -> frozen typed configs, strictly; and back."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w

from kdjax.errors import KdjaxError

Config = TypeVar("Config", bound=msgspec.Struct)
Key = tuple[str, ...]

_ITEM = re.compile(r"(?<=[\[,])[^][{},\"']+(?=[],])")
_AT = re.compile(r"(?P<what>.*?)(?: - at `(?P<key>[^`]*)`)?", re.DOTALL)


def load(kind: type[Config], file: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """A config of type `kind` from an optional TOML file and dotted overrides such as `decode.budget=15`.

    Override values are TOML (`[1, 2]`, `true`, `0.7`); bare words are strings, also in a list. Later overrides
    win over earlier ones, and all over the file. Optional keys that are absent take their defaults.

    Raises KdjaxError, one line naming the source, the key and its value, and what is valid, for: a missing or
    malformed file, an unknown key, a value of the wrong type or out of range.
    """
    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    document = Document.read(file, lambda tables: tables.keys() <= names)
    for text in overrides:
        document.override(text)
    return document.convert(kind)


class Document:
    """The tables of a file, and which override set what, so that an error can name the source of a value."""

    def __init__(self, file: Path | None, data: dict[str, Any]) -> None:
        self.file, self.data = file, data
        self.sources: dict[Key, str] = {}

    @classmethod
    def read(cls, file: Path | None, alike: Callable[[dict[str, Any]], bool]) -> Document:
        """Where the file is missing, the error names the nearest sibling whose tables are `alike`."""
        return cls(file, _read(file, alike) if file else {})

    def override(self, text: str) -> None:
        """Sets one key, as `KEY=VALUE` says."""
        key, value = _parse(text)
        _put(self.data, key, value, text)
        self.sources[key] = "--set " + text.replace("\n", "\\n")

    def source(self, key: Key) -> str:
        """The file or the override that gives `key` its value."""
        return _source(key, self.file, self.sources)

    def convert(self, kind: type[Config], data: dict[str, Any] | None = None) -> Config:
        """A `kind` from the tables, or from `data` that was made of them. Raises KdjaxError, see `load`."""
        data = self.data if data is None else data
        check_keys(kind, data, (), self.source)
        try:
            return msgspec.convert(data, kind)
        except msgspec.ValidationError as error:
            raise KdjaxError(_explain(error, kind, data, self.file, self.sources)) from error


def dumps(config: msgspec.Struct) -> str:
    """The config as TOML; `load` of it gives an equal config. Keys that are None are left out."""
    return tomli_w.dumps(without_none(msgspec.to_builtins(config)))


def closest(word: str, choices: Iterable[str]) -> str:
    """`did you mean x?`, or all choices where none is near."""
    choices = list(choices)
    near = difflib.get_close_matches(word, choices, n=1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(choices)}"


def _read(file: Path, alike: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        siblings = sorted(p.name for p in file.parent.glob("*.toml") if _is_alike(p, alike))
        hint = f": {closest(file.name, siblings)}" if siblings else ""
        raise KdjaxError(f"{file}: no such config file{hint}") from error
    except OSError as error:
        raise KdjaxError(f"{file}: cannot read the config file ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KdjaxError(f"{file}: not valid TOML: {error}") from error


def _is_alike(file: Path, alike: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        return alike(tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return False


def _parse(text: str) -> tuple[Key, Any]:
    name, equals, raw = text.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or not all(key):
        raise KdjaxError(f"--set {text}: expected KEY=VALUE, such as decode.budget=15")
    raw = raw.strip()
    if raw[:1] not in ("[", "{", '"', "'"):
        return key, _value(raw)
    try:
        return key, _toml(raw)
    except tomllib.TOMLDecodeError as error:
        with contextlib.suppress(tomllib.TOMLDecodeError):
            return key, _toml(_ITEM.sub(_quoted, raw))
        raise KdjaxError(
            f"--set {text}: the value is not valid TOML: {error}: in a shell, quote all of it: --set '{name}=...'"
        ) from error


def _value(raw: str) -> Any:
    """What a word stands for: itself, unless it is TOML."""
    try:
        return _toml(raw)
    except tomllib.TOMLDecodeError:
        return raw


def _toml(raw: str) -> Any:
    tables = tomllib.loads(f"value = {raw}")
    return tables["value"] if len(tables) == 1 else raw  # more: the text went on with keys of its own


def _quoted(item: re.Match[str]) -> str:
    """An item of a list as TOML: a shell takes the quotes off the words of `[tree,chain]`."""
    word = item[0].strip()
    return json.dumps(word, ensure_ascii=False) if word and isinstance(_value(word), str) else item[0]


def _put(data: dict[str, Any], key: Key, value: Any, text: str) -> None:
    for depth, part in enumerate(key[:-1], 1):
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise KdjaxError(f"--set {text}: {'.'.join(key[:depth])} is a value, not a table: drop '.{key[depth]}'")
    data[key[-1]] = value


def _source(key: Key, file: Path | None, sources: dict[Key, str]) -> str:
    for length in range(len(key), 0, -1):
        if key[:length] in sources:
            return sources[key[:length]]
    if file:
        return str(file)
    inside = [text for other, text in sources.items() if other[: len(key)] == key]
    return inside[-1] if inside else "config"


def check_keys(kind: type[msgspec.Struct], data: dict[str, Any], at: Key, source: Callable[[Key], str]) -> None:
    """Raises KdjaxError for a key that `kind` does not have, in whatever table below it."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in data.items():
        key = (*at, name)
        if name not in fields:
            where = f"in [{'.'.join(at)}]" if at else "at the top level"
            raise KdjaxError(f"{source(key)}: unknown key {name!r} {where}: {closest(name, fields)}")
        inner = struct_of(fields[name])
        if inner and isinstance(value, dict):
            check_keys(inner, value, key, source)


def _explain(
    error: msgspec.ValidationError, kind: type[msgspec.Struct], data: Any, file: Path | None, sources: dict[Key, str]
) -> str:
    match = _AT.fullmatch(str(error))
    assert match is not None
    key: Key = tuple(part for part in (match["key"] or "$").removeprefix("$").split(".") if part)
    plain = tuple(part.split("[")[0] for part in key)
    source = _source(plain, file, sources)
    what = match["what"]
    if isinstance(error.__cause__, KdjaxError):
        return f"{source}: {what}"
    for part in plain:
        data = data.get(part, {}) if isinstance(data, dict) else data
    choices = _literals(type_at(kind, plain))
    if choices and isinstance(data, str):
        what = f"not one of its values: {closest(data, choices)}"
    return f"{source}: {'.'.join(key) or 'the config'} = {data!r}: {what[0].lower()}{what[1:]}"


def type_at(kind: Any, key: Key) -> Any:
    """The type of the field at `key`; None where there is none."""
    for part in key:
        struct = struct_of(kind)
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(struct)} if struct else {}
        kind = fields.get(part)
    return kind


def struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """The struct that a field of that type may hold; None where it holds none."""
    options = typing.get_args(kind) or (kind,)
    return next((t for t in options if isinstance(t, type) and issubclass(t, msgspec.Struct)), None)


def _literals(kind: Any) -> list[str]:
    if typing.get_origin(kind) is typing.Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    return [choice for option in typing.get_args(kind) for choice in _literals(option)]


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return value
