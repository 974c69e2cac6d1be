"""Which published model a folder holds, where the folder tells."""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

from kdjax.errors import KdjaxError


class Revision(NamedTuple):
    """`name` as on Hugging Face, without the owner; `commit` 40 hexadecimal digits. Either is None where unknown."""

    name: str
    commit: str | None


def revision(folder: str | pathlib.Path) -> Revision:
    """From the folder's place in the Hugging Face cache (`models--OWNER--NAME/snapshots/COMMIT`), else its own name and
    what `hf download --local-dir` notes beside the files."""
    path = pathlib.Path(folder).absolute()
    if path.parent.name == "snapshots" and (repo := path.parent.parent.name).startswith("models--"):
        return Revision(repo.split("--", 2)[-1], path.name if _is_commit(path.name) else None)
    note = path / ".cache" / "huggingface" / "download" / "config.json.metadata"
    try:
        commit = note.read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    return Revision(path.name, commit if _is_commit(commit) else None)


def _is_commit(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", text) is not None


def check_revisions(drafter: str | pathlib.Path, target: str | pathlib.Path) -> None:
    """Raises KdjaxError where both folders tell which model they hold and `X-DFlash` meets another target than `X`.

    Kimi-K2.5 and Kimi-K2.6 have equal shapes, so that nothing else shows a drafter of the wrong one.
    """
    mine, theirs = revision(drafter).name, revision(target).name
    trained_for, is_drafter, _ = mine.partition("-DFlash")
    family = r"Kimi-K2(\.\d+)?"
    if not (is_drafter and re.match(family, trained_for) and re.match(family, theirs)):
        return
    if theirs != trained_for and not theirs.startswith(f"{trained_for}-"):
        raise KdjaxError(
            f"{drafter} is the drafter of {trained_for} and {target} holds {theirs}: use {theirs}-DFlash "
            "(or allow the mismatch, at a lower acceptance)"
        )
