"""The product in XLA, cut in the open so that it makes no parts of its own."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.numerics import precision

TILE = (128, 64)
"""Tokens and outputs of one program, about."""
PROGRAMS = 192
"""From which on the multiprocessors are busy, and XLA makes no parts of its own."""
LEAST_COLUMNS = 128
"""Of a part."""


def split_matmul_nt(
    x: Float[Array, "tokens width"], *weights: Float[Array, "_ width"], parts: int | None = None
) -> Float32[Array, "parts tokens out"]:
    """x @ weight^T for weights side by side, float32: the product is the sum over `parts`.

    XLA joins the weights where it reads them, without a copy. `parts` is a power of two; where it is None, one that
    keeps a GPU busy at these sizes.
    """
    (tokens, width), out = x.shape, sum(weight.shape[0] for weight in weights)
    parts = parts or _parts(tokens, out, width)
    weight = weights[0] if len(weights) == 1 else jnp.concatenate(weights)
    return lax.dot_general(
        x.reshape(tokens, parts, -1),
        weight.reshape(out, parts, -1),
        (((2,), (2,)), ((1,), (1,))),
        precision=precision(x.dtype),
        preferred_element_type=jnp.float32,
    )


def _parts(tokens: int, out: int, width: int) -> int:
    """The smallest power of two that gives enough tiles, or the largest that cuts the columns into fair parts."""
    tiles, parts = -(-tokens // TILE[0]) * -(-out // TILE[1]), 1
    while tiles * parts < PROGRAMS and width % (2 * parts) == 0 and width // (2 * parts) >= LEAST_COLUMNS:
        parts *= 2
    return parts
