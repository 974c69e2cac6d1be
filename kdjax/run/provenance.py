from __future__ import annotations

import datetime
import hashlib
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("kdjax", "jax", "jaxlib", "flax", "numpy", "msgspec", "tiktoken", "math-verify")
HASHED_WHOLE = 64 * 2**20


def provenance(
    checkpoints: Mapping[str, Path], backend: str, files: Mapping[str, Path] | None = None
) -> dict[str, Any]:
    """What it takes to repeat a run: command, time, git revision, versions, devices, kernel backend, checkpoints.

    `checkpoints` maps a role (`target`, `drafter`) to its folder, `files` one (`prompts`) to a file.
    """
    import jax

    return {
        "command": sys.argv,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": git_revision(Path(__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
        "backend": backend,
        "checkpoints": {
            role: {"path": str(path), "fingerprint": fingerprint(path)} for role, path in checkpoints.items()
        },
        "files": {
            role: {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for role, path in (files or {}).items()
        },
    }


REPEATABLE = ("git", "python", "versions", "devices", "backend", "checkpoints", "files")
"""Keys that must agree between what one result was measured with and what the next one is."""


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys of REPEATABLE, dotted, that differ between two provenances; where a file lies does not count."""

    def leaves(value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {at: value}
        inner = {key: item for key, item in value.items() if key != "path"}
        return {at: None} | {k: v for key, item in inner.items() for k, v in leaves(item, f"{at}.{key}").items()}

    mine, theirs = ({k: v for key in REPEATABLE for k, v in leaves(p.get(key), key).items()} for p in (one, other))
    return sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))


def git_revision(folder: Path) -> dict[str, Any] | None:
    """Commit, whether the tree differs from it, and the SHA-256 of the difference in tracked files.

    None where the code is not in a git checkout.
    """
    try:
        commit, diff = (
            subprocess.run(["git", *args], cwd=folder, capture_output=True, check=True, timeout=10).stdout
            for args in (("rev-parse", "HEAD"), ("diff", "HEAD", "--binary"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {
        "commit": commit.decode().strip(),
        "dirty": bool(diff),
        "diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
    }


def fingerprint(folder: Path) -> str:
    """SHA-256 over names, sizes and contents of the files of a checkpoint.

    Of files over 64 MiB only the first MiB is read (in safetensors: names, dtypes, shapes and offsets), because hashing
    a 595 GB checkpoint would take longer than the run.
    """
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as content:
            digest.update(content.read(2**20) if size > HASHED_WHOLE else content.read())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
