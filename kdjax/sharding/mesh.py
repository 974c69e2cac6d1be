"""A `jax.sharding.Mesh` from its config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from kdjax.config.mesh import AXES, MeshConfig
from kdjax.errors import KdjaxError


def alone(device: Any) -> Mesh:
    """A mesh of one device with the axes of every mesh, on which it runs its share of a larger one by itself.

    In a `kdjax.decode.loop.Program` whose runtime has the larger mesh, the device does all its work there but the
    exchanges: sums are its own part, and candidates of other devices are not merged. For measuring, not for text.
    """
    return jax.make_mesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=[device])


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over the first `config.devices` of `devices` (default: all that JAX sees, of every process).

    Axes are Auto: the layers say where data is exchanged, inside `jax.shard_map`.

    Raises:
        KdjaxError: there are too few devices, or some of a multi-process run would be left out.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < config.devices:
        remedy = (
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={config.devices}"
            if devices and devices[0].platform == "cpu"
            else "use a smaller mesh"
        )
        raise KdjaxError(f"the mesh needs {config.devices} devices and JAX sees {len(devices)}: {remedy}")
    chosen = devices[: config.devices]
    if absent := {d.process_index for d in devices} - {d.process_index for d in chosen}:
        raise KdjaxError(
            f"the mesh of {config.devices} devices leaves out processes {sorted(absent)}: use a mesh of all "
            f"{len(devices)} devices or start fewer processes"
        )
    shape = tuple(getattr(config, axis) for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=chosen)
