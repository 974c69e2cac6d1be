"""What stands between the products of multi-head latent attention and the attention, for few tokens.

Norms, rotation and cache rows in one kernel, rotation and W_UK of the queries in another, W_UV in a third. XLA takes
eight for the same, each of which costs about what it costs to start.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.mla_projections import triton

BACKENDS = ("triton", "interpret")


def compress(
    parts: Float32[Array, "parts product_rows q_rank_and_width"],
    x: Float[Array, "tokens hidden"],
    q_weight: Float[Array, "q_rank"],
    kv_weight: Float[Array, "rank"],
    cos: Float32[Array, "tokens half"],
    sin: Float32[Array, "tokens half"],
    cache_rows: Float[Array, "slots rows width"],
    row: Int32[Array, "tokens"],
    *,
    x_eps: float,
    eps: float,
    backend: str,
) -> tuple[Float[Array, "tokens q_rank"], Float[Array, "slots rows width"]]:
    """The normed compressed queries, and the cache with the tokens' rows written: normed latent, then rotated key.

    Args:
        parts: the product of `q_a_proj` and `kv_a_proj_with_mqa` side by side with x times the weight of its norm, as
            `split_matmul_nt` leaves it: their number is a power of two. Its rows are divided by the root mean square of
            those of x here.
        x: the layer's input, before its norm.
        q_weight: of `q_a_layernorm`; its dtype is that of the activations.
        kv_weight: of `kv_a_layernorm`.
        cos: of the tokens' positions, as is `sin`; pairs (2i, 2i + 1) rotate.
        cache_rows: in place where the caller gives them away. Slots have equally many tokens, one after the other.
        row: of the slot's cache that each token gets; those beyond its end are dropped.
        x_eps: of the norm of `x`.
        eps: of the other two.
        backend: "triton" (NVIDIA GPUs) or "interpret".

    Raises:
        NotImplementedError: the backend is not supported.
    """
    interpret = _interprets("compress", backend)
    return triton.compress(
        parts, x, q_weight, kv_weight, cos, sin, cache_rows, row, x_eps=x_eps, eps=eps, interpret=interpret
    )


def absorb_queries(
    parts: Float32[Array, "parts product_rows heads_by_nope_and_rope"],
    kv_b: Float[Array, "heads nope_and_v rank"],
    cos: Float32[Array, "tokens half"],
    sin: Float32[Array, "tokens half"],
    *,
    backend: str,
) -> tuple[Float[Array, "tokens heads rank"], Float[Array, "tokens heads rope"]]:
    """The queries in the latent space (through W_UK) and their rotated part, in the dtype of `kv_b`.

    Args:
        parts: the product of `q_b_proj`, as `split_matmul_nt` leaves it.
        kv_b: `kv_b_proj` per head: the rows of W_UK, then those of W_UV.
        cos: of the tokens' positions, as is `sin`.
        backend: "triton" (NVIDIA GPUs) or "interpret".

    Raises:
        NotImplementedError: the backend is not supported.
    """
    return triton.absorb_queries(parts, kv_b, cos, sin, interpret=_interprets("absorb_queries", backend))


def expand_values(
    latent: Float[Array, "tokens heads rank"], kv_b: Float[Array, "heads nope_and_v rank"], v: int, *, backend: str
) -> Float[Array, "tokens heads v"]:
    """The attention's result through W_UV, the last `v` rows of each head of `kv_b`.

    Raises:
        NotImplementedError: the backend is not supported.
    """
    return triton.expand_values(latent, kv_b, v, interpret=_interprets("expand_values", backend))


def _interprets(op: str, backend: str) -> bool:
    if backend not in BACKENDS:
        raise NotImplementedError(f"{op}: {backend=} is not supported; supported: {', '.join(BACKENDS)}")
    return backend == "interpret"
