"""A Flax module as structure alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def split(make: Callable[[], nnx.Module]) -> tuple[Any, Any]:
    """The graph definition and the abstract state of the module that `make` builds, of whole arrays."""
    # Inside jax.shard_map Flax would try to give the variables shardings of the mesh at hand.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return nnx.split(nnx.eval_shape(make))
