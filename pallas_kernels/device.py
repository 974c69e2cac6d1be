"""The device that a kernel is traced for."""

from __future__ import annotations

import jax


def device_kind() -> str:
    """The kind of the mesh's abstract device, where there is one (cross-lowering), or of the first device."""
    mesh = jax.sharding.get_abstract_mesh()
    abstract = getattr(mesh, "abstract_device", None)
    return abstract.device_kind if abstract is not None else jax.devices()[0].device_kind
