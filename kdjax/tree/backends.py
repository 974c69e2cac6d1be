"""Who builds trees: XLA code anywhere, or the kernels of `pallas_kernels.draft_tree`."""

from __future__ import annotations

from kdjax.errors import KdjaxError

BACKENDS = ("xla", "triton", "interpret")
"""As in `kdjax.model.runtime.Runtime`."""


def runs_kernels(backend: str) -> bool:
    """Raises KdjaxError: no such backend."""
    if backend not in BACKENDS:
        raise KdjaxError(f"draft trees: {backend=} is not supported: use one of {', '.join(BACKENDS)}")
    return backend != "xla"
