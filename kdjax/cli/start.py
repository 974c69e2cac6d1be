"""What has to be settled before JAX compiles anything."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Where compiled programs are kept: `$KDJAX_CACHE_DIR`, else `$XDG_CACHE_HOME/kdjax`, else `~/.cache/kdjax`."""
    if own := os.environ.get("KDJAX_CACHE_DIR"):
        return Path(own) / "xla"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kdjax" / "xla"


def configure_jax(*, compilation_cache: bool) -> None:
    """Imports JAX and points its persistent compilation cache at `cache_folder()`.

    `$JAX_COMPILATION_CACHE_DIR`, where set, is left alone. A folder that cannot be written is reported on stderr: the
    run goes on, only slower to start.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA logs a page per cached CPU program
    import jax

    if not compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if writable:
        jax.config.update("jax_compilation_cache_dir", str(folder))
    else:
        print(f"kdjax: {folder} is not writable: compiled programs are not kept (set KDJAX_CACHE_DIR)", file=sys.stderr)


def keep_stdout_for_python() -> None:
    """What libraries print from C goes to stderr: Gloo reports every connection between processes on stdout."""
    sys.stdout.flush()
    own = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
