"""A product of few tokens with a large weight as partial sums, which the kernel that reads them adds up.

On a GPU XLA cuts such a product over its columns too, so that all multiprocessors read, and adds the parts in a kernel
of their own unless it can fuse that into what follows. It cannot fuse into a Pallas kernel.
"""

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
REPEATED = 8
"""Rows in place of one token. Of one XLA makes a reduction, which reads weights at half of the rate of a product."""


def split_matmul_nt(
    x: Float[Array, "tokens width"],
    *weights: Float[Array, "_ width"],
    column_scale: Float[Array, "width"] | None = None,
) -> Float32[Array, "parts rows out"]:
    """(x * column_scale) @ weight^T for weights side by side, float32: the product is the sum over `parts`.

    XLA joins the weights where it reads them, without a copy. The number of parts is a power of two that keeps a GPU
    busy at these sizes. Rows are tokens; one token has several that are equal, of which the first is to be read.

    Args:
        x: the tokens.
        weights: matrices that read the same input.
        column_scale: the weight of a norm before the product; None is none.
    """
    if column_scale is not None:
        x = x * jnp.broadcast_to(column_scale, x.shape)
    if x.shape[0] == 1:
        x = jnp.broadcast_to(x, (REPEATED, x.shape[1]))
    (tokens, width), out = x.shape, sum(weight.shape[0] for weight in weights)
    parts = _parts(tokens, out, width)
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
