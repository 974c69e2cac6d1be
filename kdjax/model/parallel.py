"""Exchanges between the devices of a mesh, inside `jax.shard_map`; no axes is one device, where they do nothing."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped

from kdjax.config.mesh import Axes


def total(x: Shaped[Array, "*shape"], axes: Axes) -> Shaped[Array, "*shape"]:
    """The sum of every device's part: one all-reduce."""
    return lax.psum(x, axes) if axes else x


def parts(axes: Axes) -> int:
    """How many parts `axes` make."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def index(axes: Axes) -> Int32[Array, ""]:
    """Which of the parts that `axes` make is this device's."""
    return lax.axis_index(axes).astype(jnp.int32) if axes else jnp.zeros((), jnp.int32)


def gather_last(x: Shaped[Array, "*lead part"], axes: Axes, whole: int | None = None) -> Shaped[Array, "*lead whole"]:
    """The parts side by side along the last dimension: one all-gather.

    `whole` is the width that the parts make. Where one device runs its share alone (`kdjax.sharding.alone`), its part
    stands for all of them.
    """
    if not axes:
        return x
    gathered = lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True)
    return gathered if whole is None else jnp.tile(gathered, whole // gathered.shape[-1])
