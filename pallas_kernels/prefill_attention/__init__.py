"""Multi-head latent attention of a prompt's chunk over the prefix and itself, with per-head keys and values.

Absorbed attention spends 2 * (2 rank + rope) operations per head, token and key (2,176 for K2), materialised attention
2 * (nope + rope + v) = 640 and, once per chunk, 2 * rank * (nope + v) per head and key: from about 170 tokens on the
latter is less work. Memory stays bounded because keys and values exist for one segment of the prefix at a time.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.device import device_kind
from pallas_kernels.numerics import precision
from pallas_kernels.prefill_attention import triton, xla
from pallas_kernels.prefill_attention.config import Config, choose
from pallas_kernels.prefill_attention.reference import reference as reference
from pallas_kernels.prefill_attention.state import State

BACKENDS = ("xla", "triton", "interpret")
SEGMENT = 8192


def prefill_attention(
    q_nope: Float[Array, "slots q heads nope"],
    q_rope: Float[Array, "slots q heads rope"],
    cache_rows: Float[Array, "slots rows width"],
    lengths: Int32[Array, "slots"],
    up: Float[Array, "heads nope_and_v rank"],
    *,
    scale: float,
    backend: str,
    segment: int = SEGMENT,
    config: Config | None = None,
) -> Float[Array, "slots q heads v"]:
    """softmax(scale * q . key) @ value; token i sees the rows 0 to lengths[s] + i, its own among them.

    Args:
        q_nope: the part of each head's query that has no position.
        q_rope: its rotary part, after RoPE.
        cache_rows: latent and rotary key of the prefix and of the chunk, which is at rows lengths[s] to lengths[s] + q.
        lengths: rows of the prefix, per slot.
        up: kv_b_proj by head: W_UK (nope rows), then W_UV.
        scale: factor on the scores.
        backend: "xla", "triton" (NVIDIA GPUs) or "interpret".
        segment: most rows whose keys and values exist at once, a multiple of 256.
        config: tile sizes instead of the tuned ones.

    Raises:
        NotImplementedError: the backend is not supported.
    """
    if backend not in BACKENDS:
        raise NotImplementedError(f"prefill_attention: {backend=} is not supported; supported: {', '.join(BACKENDS)}")
    slots, q, heads, nope = q_nope.shape
    rank, rows, dtype = up.shape[2], cache_rows.shape[1], q_nope.dtype
    if backend == "xla":
        attend = functools.partial(xla.attend, scale=scale)
    else:
        config = config or choose(device_kind(), dtype, slots * q * heads)
        interpret = backend == "interpret"
        attend = functools.partial(triton.attend, scale=scale, config=config, interpret=interpret)
    segment = min(segment, -(-rows // 256) * 256)
    last = jnp.minimum(lengths[:, None] + jnp.arange(q, dtype=jnp.int32)[None, :], rows - 1)

    def body(i: Int32[Array, ""], state: State) -> State:
        start = i * segment
        # beyond the end of the cache the last row repeats, which no token is allowed to see there
        held = jnp.minimum(start + jnp.arange(segment, dtype=jnp.int32), rows - 1)
        keys = jnp.take(cache_rows, held, axis=1, mode="clip").astype(dtype)
        expanded = jnp.einsum("scr,hxr->shcx", keys[..., :rank], up, precision=precision(dtype))
        return attend(q_nope, q_rope, expanded, keys[..., rank:], last - start, state)

    state = State.empty(slots, q, heads, up.shape[1] - nope)
    longest = jnp.minimum(jnp.max(lengths) + q, rows)
    state = lax.fori_loop(0, -(-longest // segment), body, state)
    return (state.acc / state.total[..., None]).astype(dtype)
