"""One segment of prefill attention in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.numerics import precision
from pallas_kernels.prefill_attention.state import State
from pallas_kernels.tiles import LOG2_E, UNSEEN


def attend(
    q_nope: Float[Array, "slots q heads nope"],
    q_rope: Float[Array, "slots q heads rope"],
    expanded: Float[Array, "slots heads segment nope_and_v"],
    k_rope: Float[Array, "slots segment rope"],
    last: Int32[Array, "slots q"],
    state: State,
    *,
    scale: float,
) -> State:
    """`state` with the keys of the segment added; token i of slot s sees those at or below last[s, i]."""
    p, nope = precision(q_nope.dtype), q_nope.shape[-1]
    keys, values = expanded[..., :nope], expanded[..., nope:]
    scores = jnp.einsum("sqhn,shcn->sqhc", q_nope, keys, precision=p, preferred_element_type=jnp.float32)
    scores += jnp.einsum("sqhp,scp->sqhc", q_rope, k_rope, precision=p, preferred_element_type=jnp.float32)
    seen = jnp.arange(expanded.shape[2], dtype=jnp.int32)[None, None, :] <= last[:, :, None]
    seen = seen[:, :, None, :]
    scores = jnp.where(seen, scores * (scale * LOG2_E), UNSEEN)
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=-1))
    weight = jnp.where(seen, jnp.exp2(scores - peak[..., None]), 0.0)
    keep = jnp.exp2(state.peak - peak)
    added = jnp.einsum(
        "sqhc,shcv->sqhv", weight.astype(values.dtype), values, precision=p, preferred_element_type=jnp.float32
    )
    return State(state.acc * keep[..., None] + added, peak, state.total * keep + jnp.sum(weight, axis=-1))
