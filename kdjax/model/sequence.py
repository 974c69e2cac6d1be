"""A KV cache whose rows are dealt out over mesh axes, for contexts that do not fit on every device.

Row r lies in block r // 64, and blocks go round the devices: any prefix is shared evenly, and a device's rows keep
their order, so that its committed rows are again a prefix of what it holds and tree rows follow them. Every device
attends for the heads of the whole group over its own rows; the parts are joined by their log-sum-exp.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from kdjax.config.mesh import Axes
from kdjax.model import parallel
from pallas_kernels.tree_attention import Plan, merge, tree_attention_partial

BLOCK = 64


def own_row(row: Int32[Array, "*shape"], rows: int, axes: Axes) -> Int32[Array, "*shape"]:
    """Where this device, which holds `rows` rows, has the cache's row; `rows` where another one has it."""
    if not axes:
        return row
    block = row // BLOCK
    own = block % parallel.parts(axes) == parallel.index(axes)
    return jnp.where(own, block // parallel.parts(axes) * BLOCK + row % BLOCK, rows)


def own_lengths(lengths: Int32[Array, "slots"], axes: Axes) -> Int32[Array, "slots"]:
    """How many of the first `lengths` rows this device holds."""
    if not axes:
        return lengths
    cycle = BLOCK * parallel.parts(axes)
    return lengths // cycle * BLOCK + jnp.clip(lengths % cycle - BLOCK * parallel.index(axes), 0, BLOCK)


def own_ancestors(
    ancestors: Bool[Array, "slots q q"] | None, lengths: Int32[Array, "slots"], q: int, axes: Axes
) -> Bool[Array, "slots q q"] | None:
    """The columns of the tree rows that this device holds, in their order, then columns that nobody sees."""
    if not axes:
        return ancestors
    if ancestors is None:
        ancestors = jnp.broadcast_to(jnp.tril(jnp.ones((q, q), bool)), (lengths.shape[0], q, q))
    held = own_lengths(lengths, axes)[:, None] + jnp.arange(q, dtype=jnp.int32)[None, :]
    row = (held // BLOCK * parallel.parts(axes) + parallel.index(axes)) * BLOCK + held % BLOCK
    node = row - lengths[:, None]
    columns = jnp.take_along_axis(ancestors, jnp.minimum(node, q - 1)[:, None, :], axis=2)
    return columns & (node < q)[:, None, :]


def attend(
    q_latent: Float[Array, "slots q heads rank"],
    q_rope: Float[Array, "slots q heads rope"],
    rows: Float[Array, "slots rows rank+rope"],
    lengths: Int32[Array, "slots"],
    ancestors: Bool[Array, "slots q q"] | None,
    axes: Axes,
    *,
    scale: float,
    backend: str,
    shared: Plan | None,
) -> Float[Array, "slots q heads rank"]:
    """`tree_attention` of this device's heads over the rows of all devices of the group.

    `rows`, `lengths` and `ancestors` are this device's own; `shared` is planned for the heads of the group. One
    all-gather of queries, one all-to-all of results.
    """
    slots, q, heads, rank = q_latent.shape
    query = lax.all_gather(jnp.concatenate([q_latent, q_rope], axis=-1), axes, axis=2, tiled=True)
    out, lse = tree_attention_partial(
        query[..., :rank], query[..., rank:], rows, lengths, ancestors, scale=scale, backend=backend, shared=shared
    )
    # As bits of one array: a second exchange would cost about as much as this one.
    words = jnp.concatenate([_words(out), _words(lse[..., None])], axis=-1)
    words = words.reshape(slots, q, parallel.parts(axes), heads, -1)
    words = lax.all_to_all(words, axes, split_axis=2, concat_axis=0)
    return merge(_values(words[..., :-1], out.dtype), _values(words[..., -1:], lse.dtype)[..., 0])[0]


def _words(x: Float[Array, "*lead width"]) -> UInt32[Array, "*lead words"]:
    per_word = 4 // x.dtype.itemsize
    parts = x if per_word == 1 else x.reshape(*x.shape[:-1], -1, per_word)
    return lax.bitcast_convert_type(parts, jnp.uint32)


def _values(words: UInt32[Array, "*lead words"], dtype: jnp.dtype) -> Float[Array, "*lead width"]:
    return lax.bitcast_convert_type(words, dtype).reshape(*words.shape[:-1], -1)
