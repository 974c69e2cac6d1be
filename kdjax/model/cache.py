"""The KV cache of MLA as an explicit value: one latent row per token, contiguous per slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kdjax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Cache rows of every layer and slot.

    A row is the latent after `kv_a_layernorm`, then the shared key after RoPE (interleaved order). Rows below
    `lengths[s]` are committed; rows from there on hold the tree of the current forward or stale, finite values.

    Layers are separate arrays: slicing a stacked array would copy a whole layer, capacity included, in every forward.

    Attributes:
        latent: per layer, [slots, rows, kv_lora_rank + qk_rope_head_dim].
        lengths: int32 [slots].
    """

    # Any: as a pytree it also carries shape structs and shardings in place of its arrays.
    latent: tuple[Any, ...]
    lengths: Any

    @classmethod
    def empty(cls, config: ModelConfig, slots: int, capacity: int, tree_rows: int, dtype: str | jnp.dtype) -> KVCache:
        """Room for `capacity` committed tokens per slot (rounded up to 64) plus the `tree_rows` of one forward."""
        rows = -(-capacity // 64) * 64 + tree_rows
        latent = tuple(jnp.zeros((slots, rows, config.latent_dim), dtype) for _ in range(config.num_hidden_layers))
        return cls(latent, jnp.zeros(slots, jnp.int32))

    @property
    def rows(self) -> int:
        return self.latent[0].shape[1]


def append(
    layer: Float[Array, "slots rows width"], new: Float[Array, "slots n width"], start: Int32[Array, "slots"]
) -> Float[Array, "slots rows width"]:
    """Write `new[s, i]` at row `start[s] + i`. Rows beyond the end are dropped, never shifted."""
    slot = jnp.arange(layer.shape[0], dtype=jnp.int32)[:, None]
    row = start[:, None] + jnp.arange(new.shape[1], dtype=jnp.int32)[None, :]
    return layer.at[slot, row].set(new.astype(layer.dtype), mode="drop", unique_indices=True)


def move_rows(
    layer: Float[Array, "slots rows width"],
    start: Int32[Array, "slots"],
    accepted: Int32[Array, "slots n"],
    n_accepted: Int32[Array, "slots"],
) -> Float[Array, "slots rows width"]:
    """Row start[s] + accepted[s, j] goes to row start[s] + j for j < n_accepted[s]; other rows stay.

    Sources are read before anything is written, so overlapping moves are safe.
    """
    slots, n = accepted.shape
    slot = jnp.arange(slots, dtype=jnp.int32)[:, None]
    j = jnp.arange(n, dtype=jnp.int32)[None, :]
    moved = layer[slot, jnp.clip(start[:, None] + accepted, 0, layer.shape[1] - 1)]
    target = jnp.where(j < n_accepted[:, None], start[:, None] + j, layer.shape[1])
    return layer.at[slot, target].set(moved, mode="drop")


def commit(cache: KVCache, accepted: Int32[Array, "slots n"], n_accepted: Int32[Array, "slots"]) -> KVCache:
    """Keep the accepted tree rows (indices into the tree, root = 0), in path order, and advance the lengths."""
    latent = tuple(move_rows(layer, cache.lengths, accepted, n_accepted) for layer in cache.latent)
    return KVCache(latent, cache.lengths + n_accepted)
