"""Absorbed multi-head latent attention of a token tree over a shared prefix.

Every token sees the committed cache rows of its slot and those tree rows that its row of the ancestor mask names.
Keys are whole cache rows (latent and rotary part), values are their latent part: one KV head shared by all heads.
"""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.tree_attention import xla
from pallas_kernels.tree_attention.reference import reference as reference

BACKENDS = ("xla",)


def tree_attention(
    q_latent: Float[Array, "slots q heads rank"],
    q_rope: Float[Array, "slots q heads rope"],
    cache_rows: Float[Array, "slots rows rank+rope"],
    lengths: Int32[Array, "slots"],
    ancestors: Bool[Array, "slots q q"] | None,
    *,
    scale: float,
    backend: str,
) -> Float[Array, "slots q heads rank"]:
    """softmax(scale * q . row) @ row[:rank] over the rows a token sees.

    Those are rows < lengths[s], and tree rows lengths[s] + j where ancestors[s, i, j]; None is the causal chain. Tree
    rows that fall beyond `rows` are not seen, and a token that sees no row at all gets zeros. Work is bounded by the
    longest live prefix, not by `rows`. Softmax in float32; result in the dtype of `q_latent`.

    Raises:
        NotImplementedError: the backend is not supported.
    """
    if backend not in BACKENDS:
        raise NotImplementedError(f"tree_attention: {backend=} is not supported; supported: {', '.join(BACKENDS)}")
    return xla.tree_attention(q_latent, q_rope, cache_rows, lengths, ancestors, scale=scale)
