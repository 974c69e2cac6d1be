"""Absorbed multi-head latent attention of a token tree over a shared prefix.

Every token sees the committed cache rows of its slot and those tree rows that its row of the ancestor mask names.
Keys are whole cache rows (latent and rotary part), values are their latent part: one KV head shared by all heads.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.device import device_kind
from pallas_kernels.tree_attention import triton, xla
from pallas_kernels.tree_attention.config import Config, choose, mosaic_unfit
from pallas_kernels.tree_attention.merge import merge as merge
from pallas_kernels.tree_attention.merge import merge_over as merge_over
from pallas_kernels.tree_attention.reference import reference as reference
from pallas_kernels.tree_attention.schedule import Plan as Plan
from pallas_kernels.tree_attention.schedule import make_plan

BACKENDS = ("xla", "triton", "mosaic", "interpret")


def plan(
    lengths: Int32[Array, "slots"],
    ancestors: Bool[Array, "slots q q"] | None,
    *,
    q: int,
    heads: int,
    cache_rows: int,
    rank: int,
    rope: int,
    dtype: jnp.dtype,
    cache_dtype: jnp.dtype,
    backend: str,
    config: Config | None = None,
) -> Plan | None:
    """What all layers of one forward share: the packed mask and the division of the caches among programs.

    Args:
        lengths: committed rows of each slot.
        ancestors: as of `tree_attention`.
        q: tokens per slot in the calls it is for.
        heads: of their queries.
        cache_rows: per slot, of their cache.
        rank: columns of the latent part of a cache row.
        rope: columns of its rotary part.
        dtype: of the queries.
        cache_dtype: of the cache.
        backend: that of the calls; with "triton" the tuned table decides between the Triton and the Mosaic kernel.
        config: tile sizes instead of the tuned ones.

    Returns None for "xla", which has nothing to prepare.

    Raises:
        NotImplementedError: backend "mosaic" with a device or sizes that its kernel is not for.
    """
    if backend == "xla":
        return None
    if config is None:
        kernels = _kernels(backend, mosaic_unfit(rank, rope, cache_rows, dtype, cache_dtype))
        config = choose(device_kind(), q * heads, lengths.shape[0], cache_rows, dtype, cache_dtype, kernels)
    return make_plan(lengths, ancestors, query_rows=q * heads, q=q, rows=cache_rows, config=config)


def _kernels(backend: str, unfit: str) -> tuple[str, ...]:
    """The kernels that may serve a backend, where `unfit` says why Mosaic cannot."""
    if backend == "mosaic":
        if unfit:
            raise NotImplementedError(f"tree_attention: backend='mosaic' {unfit}: use 'triton'")
        return ("mosaic",)
    return ("triton",) if unfit or backend == "interpret" else ("mosaic", "triton")


def tree_attention(
    q_latent: Float[Array, "slots q heads rank"],
    q_rope: Float[Array, "slots q heads rope"],
    cache_rows: Float[Array, "slots rows rank+rope"],
    lengths: Int32[Array, "slots"],
    ancestors: Bool[Array, "slots q q"] | None,
    *,
    scale: float,
    backend: str,
    shared: Plan | None = None,
) -> Float[Array, "slots q heads rank"]:
    """softmax(scale * q . row) @ row[:rank] over the rows a token sees.

    Those are rows < lengths[s], and tree rows lengths[s] + j where ancestors[s, i, j]; None is the causal chain. Tree
    rows that fall beyond `rows` are not seen, and a token that sees no row at all gets zeros. Work is bounded by the
    longest live prefix, not by `rows`. Softmax in float32; result in the dtype of `q_latent`. Rows up to the next
    multiple of 64 beyond the tree must be finite.

    Args:
        q_latent: queries in the latent space (absorbed W_UK).
        q_rope: their rotary part.
        cache_rows: latent and rotary key of every row; the tree's own rows are among them.
        lengths: committed rows of each slot.
        ancestors: which tree rows each token sees, itself among them.
        scale: factor on the scores.
        backend: "xla", "triton" (NVIDIA GPUs) or "interpret".
        shared: the result of `plan` for these lengths and ancestors; made here where it is None.

    Raises:
        NotImplementedError: the backend is not supported.
    """
    return tree_attention_partial(
        q_latent, q_rope, cache_rows, lengths, ancestors, scale=scale, backend=backend, shared=shared
    )[0]


def tree_attention_partial(
    q_latent: Float[Array, "slots q heads rank"],
    q_rope: Float[Array, "slots q heads rope"],
    cache_rows: Float[Array, "slots rows rank+rope"],
    lengths: Int32[Array, "slots"],
    ancestors: Bool[Array, "slots q q"] | None,
    *,
    scale: float,
    backend: str,
    shared: Plan | None = None,
) -> tuple[Float[Array, "slots q heads rank"], Float32[Array, "slots q heads"]]:
    """`tree_attention` and the natural log-sum-exp of its scaled scores, -inf where a token sees nothing.

    For a cache sharded over the sequence: the shard that begins at row `first` is given `lengths - first`, which may
    be negative or exceed its rows, and `merge_over` joins the results of all shards.

    Raises:
        NotImplementedError: the backend is not supported.
    """
    if backend not in BACKENDS:
        raise NotImplementedError(f"tree_attention: {backend=} is not supported; supported: {', '.join(BACKENDS)}")
    if backend == "xla":
        return xla.partial(q_latent, q_rope, cache_rows, lengths, ancestors, scale=scale)
    if shared is None:
        q, heads = q_latent.shape[1:3]
        shared = plan(
            lengths,
            ancestors,
            q=q,
            heads=heads,
            cache_rows=cache_rows.shape[1],
            rank=q_latent.shape[3],
            rope=q_rope.shape[3],
            dtype=q_latent.dtype,
            cache_dtype=cache_rows.dtype,
            backend=backend,
        )
    assert shared is not None
    if shared.config.kernel == "mosaic":
        from pallas_kernels.tree_attention import mosaic  # its interface moves with JAX: nobody else shall need it

        return mosaic.partial(q_latent, q_rope, cache_rows, lengths, shared, scale=scale)
    return triton.partial(q_latent, q_rope, cache_rows, lengths, shared, scale=scale, interpret=backend == "interpret")
