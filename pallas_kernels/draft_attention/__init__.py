"""Attention of one draft block over the cached context and over itself (DFlash).

Grouped-query attention of few queries over many keys: a block's positions see the committed rows of their slot, in
sliding layers the nearest ones, and the block's own keys, in both directions or causally.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from pallas_kernels.draft_attention import triton, xla
from pallas_kernels.draft_attention.reference import reference as reference
from pallas_kernels.draft_attention.softmax import KEYS as KEYS
from pallas_kernels.draft_attention.softmax import block_sees, fold, group, normalised

BACKENDS = ("xla", "triton", "interpret")


def draft_attention(
    query: Float[Array, "slots block heads head_dim"],
    k: Float[Array, "slots block kv_heads head_dim"],
    v: Float[Array, "slots block kv_heads head_dim"],
    context_k: Float[Array, "slots rows kv_heads head_dim"],
    context_v: Float[Array, "slots rows kv_heads head_dim"],
    start: Int32[Array, "slots"],
    *,
    causal: bool,
    window: int | None,
    backend: str,
) -> Float[Array, "slots block heads head_dim"]:
    """Softmax attention in float32, head h reading key head h // (heads / kv_heads), scale head_dim^-0.5.

    Position i of the block stands at start[s] + i. It sees context rows below start[s], with a `window` those less than
    `window` before it, and the block's keys, where `causal` those up to its own. The cost follows the live length and
    the window, not the capacity. Rows up to the next multiple of `KEYS` must be finite.

    Args:
        query: after their norm and rotation, as the keys.
        k: keys of the block itself.
        v: its values.
        context_k: keys of the committed tokens, row p at position p; `rows` is a multiple of `KEYS`.
        context_v: their values.
        start: committed tokens of each slot.
        causal: whether a position of the block sees only itself and those before it.
        window: None sees the whole context.
        backend: "xla", "triton" (NVIDIA GPUs) or "interpret".

    Raises:
        NotImplementedError: the backend is not supported.
    """
    if backend not in BACKENDS:
        raise NotImplementedError(f"draft_attention: {backend=} is not supported; supported: {', '.join(BACKENDS)}")
    slots, block = query.shape[:2]
    inside = block_sees(slots, block, causal)
    grouped = group(query, k.shape[2])
    if backend == "xla":
        state = xla.over_context(grouped, context_k, context_v, start, window, first=(k, v, inside))
    else:
        interpret = backend == "interpret"
        state = triton.over_context(grouped, context_k, context_v, start, window, interpret=interpret)
        state = fold(state, grouped, k, v, inside)
    return normalised(state, query)
