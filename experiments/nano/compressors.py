"""General-purpose compressors on the very bytes that the model is scored on."""

from __future__ import annotations

import lzma
import pathlib
import shutil
import subprocess
import tempfile


def xz_bytes(data: bytes) -> int:
    """Size of `xz -9e`, container (some 60 bytes) included."""
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def zpaq_bytes(data: bytes) -> int | None:
    """Size of `zpaq -m5`, less that of an archive of nothing (1 KB); None where the program is not installed."""
    program = shutil.which("zpaq")
    if program is None:
        return None
    return _archive_bytes(program, data) - _archive_bytes(program, b"")


def _archive_bytes(program: str, data: bytes) -> int:
    with tempfile.TemporaryDirectory() as folder:
        text, archive = pathlib.Path(folder) / "text", pathlib.Path(folder) / "text.zpaq"
        text.write_bytes(data)
        command = [program, "add", archive.name, text.name, "-m5", "-t1"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        return archive.stat().st_size
