from __future__ import annotations

import datetime
import hashlib
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("kdjax", "jax", "jaxlib", "flax", "numpy", "msgspec", "tiktoken")
HASHED_WHOLE = 64 * 2**20


def provenance(checkpoints: dict[str, Path], backend: str) -> dict[str, Any]:
    """What it takes to repeat a run: command, time, git revision, versions, devices, kernel backend, checkpoints.

    `checkpoints` maps a role (`target`, `drafter`) to its folder.
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
    }


def git_revision(folder: Path) -> dict[str, Any] | None:
    """Commit and whether the tree differs from it; None where the code is not in a git checkout."""
    try:
        commit, status = (
            subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True, timeout=10).stdout
            for args in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "dirty": bool(status.strip())}


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
