"""The KV cache of MLA as an explicit value: one latent row per token, contiguous per slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kdjax.config import ModelConfig
from kdjax.config.mesh import Axes
from kdjax.model import parallel
from kdjax.model.sequence import BLOCK, own_row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Cache rows of every layer and slot.

    A row is the latent after `kv_a_layernorm`, then the shared key after RoPE (interleaved order). Rows below
    `lengths[s]` are committed; rows from there on hold the tree of the current forward or stale, finite values.

    Layers are separate arrays: slicing a stacked array would copy a whole layer, capacity included, in every forward.
    On a mesh the rows may be dealt out over devices (`kdjax.model.sequence`).

    Attributes:
        latent: per layer, [slots, rows, kv_lora_rank + qk_rope_head_dim].
        lengths: int32 [slots].
    """

    # Any: as a pytree it also carries shape structs and shardings in place of its arrays.
    latent: tuple[Any, ...]
    lengths: Any

    @classmethod
    def empty(
        cls, config: ModelConfig, slots: int, capacity: int, tree_rows: int, dtype: str | jnp.dtype, parts: int = 1
    ) -> KVCache:
        """Room for `capacity` committed tokens per slot (rounded up to 64) plus the `tree_rows` of one forward.

        Dealt out over `parts` devices, the same number of whole blocks for each.
        """
        rows = -(-capacity // BLOCK) * BLOCK + tree_rows
        if parts > 1:
            rows = -(-rows // (BLOCK * parts)) * BLOCK * parts
        latent = tuple(jnp.zeros((slots, rows, config.latent_dim), dtype) for _ in range(config.num_hidden_layers))
        return cls(latent, jnp.zeros(slots, jnp.int32))

    @property
    def rows(self) -> int:
        """Rows per slot, committed or not; on a mesh, those of this device."""
        return self.latent[0].shape[1]


def append(
    layer: Float[Array, "slots rows width"],
    new: Float[Array, "slots n width"],
    start: Int32[Array, "slots"],
    axes: Axes = (),
) -> Float[Array, "slots rows width"]:
    """Write `new[s, i]` at row `start[s] + i`. Rows beyond the end are dropped, never shifted.

    Where rows are dealt out over `axes`, each device keeps its own.
    """
    slot = jnp.arange(layer.shape[0], dtype=jnp.int32)[:, None]
    row = appended(start, new.shape[1], layer.shape[1], axes)
    return layer.at[slot, row].set(new.astype(layer.dtype), mode="drop", unique_indices=not axes)


def appended(start: Int32[Array, "slots"], n: int, rows: int, axes: Axes = ()) -> Int32[Array, "slots n"]:
    """The rows start[s] to start[s] + n - 1 in the cache of this device, which holds `rows`; `rows` or more where they
    are beyond its end or another device's."""
    return own_row(start[:, None] + jnp.arange(n, dtype=jnp.int32)[None, :], rows, axes)


def commit(
    cache: KVCache, accepted: Int32[Array, "slots n"], n_accepted: Int32[Array, "slots"], axes: Axes = ()
) -> KVCache:
    """Keep the accepted tree rows (indices into the tree, root = 0), in path order, and advance the lengths.

    Row lengths[s] + accepted[s, j] goes to row lengths[s] + j for j < n_accepted[s]; other rows stay. Sources are read
    before anything is written, so overlapping moves are safe. Where rows are dealt out over `axes`, a moved row may
    change its device: one all-reduce for all layers.
    """
    rows, start = cache.rows, cache.lengths[:, None]
    slot = jnp.arange(accepted.shape[0], dtype=jnp.int32)[:, None]
    j = jnp.arange(accepted.shape[1], dtype=jnp.int32)[None, :]
    target = jnp.where(j < n_accepted[:, None], own_row(start + j, rows, axes), rows)
    source = own_row(start + accepted, rows, axes)
    moved = [layer[slot, jnp.clip(source, 0, rows - 1)] for layer in cache.latent]
    if axes:
        held = (source < rows)[:, :, None]
        moved = parallel.total(jnp.stack([jnp.where(held, m, jnp.zeros_like(m)) for m in moved]), axes)
    latent = tuple(layer.at[slot, target].set(m, mode="drop") for layer, m in zip(cache.latent, moved, strict=True))
    return KVCache(latent, cache.lengths + n_accepted)
