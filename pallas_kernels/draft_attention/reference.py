"""Draft attention in float32, all scores at once."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.draft_attention.softmax import block_sees, context_sees


def reference(
    query: Float[Array, "slots block heads head_dim"],
    k: Float[Array, "slots block kv_heads head_dim"],
    v: Float[Array, "slots block kv_heads head_dim"],
    context_k: Float[Array, "slots rows kv_heads head_dim"],
    context_v: Float[Array, "slots rows kv_heads head_dim"],
    start: Int32[Array, "slots"],
    *,
    causal: bool,
    window: int | None,
) -> Float32[Array, "slots block heads head_dim"]:
    """What `draft_attention` computes."""
    slots, block, heads, head_dim = query.shape
    repeats = heads // k.shape[2]
    keys, values = (
        jnp.repeat(jnp.concatenate(pair, axis=1).astype(jnp.float32), repeats, axis=2)
        for pair in ((context_k, k), (context_v, v))
    )
    rows = jnp.arange(context_k.shape[1], dtype=jnp.int32)
    seen = jnp.concatenate([context_sees(start, block, rows, window), block_sees(slots, block, causal)], axis=2)
    scores = jnp.einsum("sbhd,schd->shbc", query.astype(jnp.float32), keys, precision="highest") * head_dim**-0.5
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    weights /= jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.einsum("shbc,schd->sbhd", weights, values, precision="highest")
