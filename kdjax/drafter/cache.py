"""The drafter's context as an explicit value: keys and values of every committed token, contiguous per slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kdjax.config import DrafterConfig
from pallas_kernels.draft_attention import KEYS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftCache:
    """Row p of a slot belongs to the token at absolute position p. Keys are normed and rotated.

    Rows from the slot's length on are stale but finite, and no block reads them. Layers are separate arrays: slicing a
    stacked array would copy a whole layer, capacity included, in every draft.
    """

    # Any: as a pytree it also carries argument infos and shardings in place of its arrays.
    k: tuple[Any, ...]
    v: tuple[Any, ...]

    @classmethod
    def empty(cls, config: DrafterConfig, slots: int, capacity: int, dtype: str | jnp.dtype) -> DraftCache:
        """Room for `capacity` committed tokens per slot, rounded up to whole blocks of keys."""
        rows = -(-capacity // KEYS) * KEYS
        shape = (slots, rows, config.num_key_value_heads, config.head_dim)
        # One buffer per layer, never shared: a donated buffer can be donated only once.
        k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_hidden_layers)) for _ in "kv")
        return cls(k, v)


def append(
    cache: DraftCache,
    k: Float[Array, "layers slots n kv_heads head_dim"],
    v: Float[Array, "layers slots n kv_heads head_dim"],
    lengths: Int32[Array, "slots"],
    n_valid: Int32[Array, "slots"],
) -> DraftCache:
    """Write `k[:, s, i]`, `v[:, s, i]` at row `lengths[s] + i` for i < n_valid[s]. Rows beyond the end are dropped."""
    slots, n = k.shape[1:3]
    rows = cache.k[0].shape[1]
    i = jnp.arange(n, dtype=jnp.int32)[None, :]
    row = jnp.where(i < n_valid[:, None], lengths[:, None] + i, rows)
    slot = jnp.arange(slots, dtype=jnp.int32)[:, None]

    def write(layer: jax.Array, new: jax.Array) -> jax.Array:
        return layer.at[slot, row].set(new.astype(layer.dtype), mode="drop")

    return DraftCache(tuple(map(write, cache.k, k)), tuple(map(write, cache.v, v)))
