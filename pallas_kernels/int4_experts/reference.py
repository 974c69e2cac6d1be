"""The experts in float32, every expert for every token: the truth the backends are tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


def reference(
    x: Float[Array, "tokens hidden"],
    indices: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate: Float[Array, "experts inner hidden"],
    up: Float[Array, "experts inner hidden"],
    down: Float[Array, "experts hidden inner"],
) -> Float[Array, "tokens hidden"]:
    """`dense_experts` in float32, every expert for every token."""
    x, gate, up, down = (a.astype(jnp.float32) for a in (x, gate, up, down))
    one_hot = jax.nn.one_hot(indices, gate.shape[0], dtype=jnp.float32)
    routed = jnp.einsum("tk,tke->te", weights.astype(jnp.float32), one_hot, precision=lax.Precision.HIGHEST)
    g = jnp.einsum("td,eid->tei", x, gate, precision=lax.Precision.HIGHEST)
    u = jnp.einsum("td,eid->tei", x, up, precision=lax.Precision.HIGHEST)
    y = jnp.einsum("tei,edi->ted", jax.nn.silu(g) * u, down, precision=lax.Precision.HIGHEST)
    return jnp.einsum("te,ted->td", routed, y, precision=lax.Precision.HIGHEST)
