"""Prompts and texts from files: JSON lines with the keys id, domain and text, or one plain text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from kdjax.bundled.locate import BUNDLED
from kdjax.config.decode import AtLeast0, AtLeast1
from kdjax.config.strict import closest
from kdjax.errors import KdjaxError

Role = Literal["prompts", "texts"]
"""The table of a config that names the file, and the folder of the bundled ones."""


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` documents of a file after the first `skip`, all without it.

    `file`: JSON lines with the keys id, domain and text; a `.txt` file is one document; or `bundled:NAME`.
    """

    file: str
    skip: AtLeast0 = 0
    count: AtLeast1 | None = None


class TextsSection(Selection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts to score, by default public-domain and own ones that the bundled model was not trained on."""

    file: str = "bundled:heldout"


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    domain: str
    text: str


def file_of(section: Selection, role: Role) -> Path:
    """Raises KdjaxError where there is no such file."""
    shelf = Path(__file__).parent / role
    if not section.file.startswith(BUNDLED):
        if not Path(section.file).is_file():
            raise KdjaxError(f"{role}.file = {section.file!r}: no such file: give JSON lines or {BUNDLED}NAME")
        return Path(section.file)
    name = section.file.removeprefix(BUNDLED)
    names = sorted(file.stem for file in shelf.glob("*.jsonl"))
    if name not in names:
        raise KdjaxError(f"{role}.file = {section.file!r}: no such bundled {role}: {closest(name, names)}")
    return shelf / f"{name}.jsonl"


def read(section: Selection, role: Role) -> list[Document]:
    """Raises KdjaxError for a line that is not a document, an id that is there twice, or fewer than `count`."""
    file = file_of(section, role)
    found = _one(file) if file.suffix == ".txt" else _lines(file)
    left = len(found) - section.skip
    count = left if section.count is None else section.count
    if not 0 < count <= left:
        raise KdjaxError(
            f"{file} has {len(found)} {role}, {role}.skip = {section.skip} and count = {section.count}: lower them "
            f"or add {role}"
        )
    return found[section.skip :][:count]


def _one(file: Path) -> list[Document]:
    try:
        return [Document(file.stem, file.stem, file.read_bytes().decode())]
    except UnicodeDecodeError as error:
        raise KdjaxError(f"{file}: not UTF-8 ({error.reason} at byte {error.start}): convert it") from error


def _lines(file: Path) -> list[Document]:
    found: dict[str, Document] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            document = msgspec.json.decode(line, type=Document)
        except msgspec.DecodeError as error:
            raise KdjaxError(f"{file}, line {number}: {error}: write id, domain and text as one JSON object") from error
        if document.id in found:
            raise KdjaxError(f"{file}, line {number}: the id {document.id!r} is there already: give each its own")
        found[document.id] = document
    return list(found.values())
