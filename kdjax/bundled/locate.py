"""Names of models -> checkpoint folders."""

from __future__ import annotations

from pathlib import Path

from kdjax.bundled import bundled_model
from kdjax.config.generate import ModelSection
from kdjax.errors import KdjaxError

BUNDLED = "bundled:"


def locate(model: ModelSection, *, needs_drafter: bool) -> tuple[Path, Path | None]:
    """Folders of target and drafter; the second is None only where no drafter is needed.

    Raises KdjaxError for an unknown bundled name, a folder that is missing or no checkpoint, or a target without a
    drafter.
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
        try:
            return bundled_model(name.removeprefix(BUNDLED)) / role
        except KdjaxError as error:
            raise KdjaxError(f"model.{role}: {error}") from error
    try:
        found = Path(name).is_dir()
    except OSError as error:
        raise KdjaxError(f"model.{role} = {name!r}: cannot look there ({error.strerror})") from error
    if not found:
        raise KdjaxError(f"model.{role} = {name!r}: no such folder: give a checkpoint folder or {BUNDLED}NAME")
    if not (Path(name) / "config.json").is_file():
        raise KdjaxError(f"model.{role} = {name!r} is no checkpoint, it has no config.json: give a checkpoint folder")
    return Path(name)
