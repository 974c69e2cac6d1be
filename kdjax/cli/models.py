"""Names of models -> checkpoint folders."""

from __future__ import annotations

from pathlib import Path

import kdjax
from kdjax.config.generate import ModelSection
from kdjax.config.strict import closest
from kdjax.errors import KdjaxError

BUNDLED = "bundled:"


def locate(model: ModelSection, *, needs_drafter: bool) -> tuple[Path, Path | None]:
    """Folders of target and drafter; the second is None only where no drafter is needed.

    Raises KdjaxError for an unknown bundled name, a missing folder, or a target without a drafter.
    """
    target = _folder("target", model.target)
    if not needs_drafter:
        return target, None
    name = model.drafter or (model.target if model.target.startswith(BUNDLED) else None)
    if name is None:
        raise KdjaxError(
            f"model.target = {model.target!r} comes without a drafter: give one with --drafter FOLDER, "
            "or decode with --mode autoregressive"
        )
    return target, _folder("drafter", name)


def _folder(role: str, name: str) -> Path:
    if name.startswith(BUNDLED):
        shelf = Path(kdjax.__path__[0]) / "bundled"
        folder = shelf / name.removeprefix(BUNDLED) / role
        if not folder.is_dir():
            known = sorted(f"{BUNDLED}{p.name}" for p in shelf.iterdir() if p.is_dir()) if shelf.is_dir() else []
            hint = closest(name, known) if known else "this installation has none, give a folder"
            raise KdjaxError(f"model.{role} = {name!r} is not a bundled model: {hint}")
        return folder
    if not Path(name).is_dir():
        raise KdjaxError(f"model.{role} = {name!r}: no such folder: give a checkpoint folder or {BUNDLED}NAME")
    return Path(name)
