"""The context in steps of `KEYS` rows with a running softmax, in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.draft_attention.softmax import KEYS, State, context_sees, empty, fold

KeysValuesSeen = tuple[
    Float[Array, "slots keys kv_heads head_dim"],
    Float[Array, "slots keys kv_heads head_dim"],
    Bool[Array, "slots block keys"],
]


def over_context(
    grouped: Float[Array, "slots block kv_heads group head_dim"],
    context_k: Float[Array, "slots rows kv_heads head_dim"],
    context_v: Float[Array, "slots rows kv_heads head_dim"],
    start: Int32[Array, "slots"],
    window: int | None,
    *,
    first: KeysValuesSeen,
) -> State:
    """From the first row that any slot's window reaches to the longest slot's end, after the keys of `first`."""
    block = grouped.shape[1]

    def body(i: Int32[Array, ""], state: State) -> State:
        begin = i * KEYS
        keys, values = (lax.dynamic_slice_in_dim(rows, begin, KEYS, axis=1) for rows in (context_k, context_v))
        row = begin + jnp.arange(KEYS, dtype=jnp.int32)
        return fold(state, grouped, keys, values, context_sees(start, block, row, window))

    nearest = jnp.int32(0) if window is None else jnp.maximum(jnp.min(start) - window + 1, 0) // KEYS
    longest = jnp.minimum(jnp.max(start), context_k.shape[1])
    return lax.fori_loop(nearest, -(-longest // KEYS), body, fold(empty(grouped), grouped, *first))
