"""How many nodes of a drafted tree are worth verifying, given what verifying costs (CaDDTree, arXiv 2606.01813)."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kdjax.errors import KdjaxError
from kdjax.tree import Tree

Scope = Literal["stream", "batch"]


@dataclasses.dataclass(frozen=True)
class CostAware:
    """Verifies as many nodes as promise the most tokens per second, chosen anew every round.

    A tree of n nodes promises 1 + sum of exp(score) tokens, the root's bonus included. Every width is looked at: where
    verifying costs less and less per node, as in a mixture of experts, a search that stops at the first decrease of the
    rate stops too early.

    Attributes:
        widths: numbers of nodes that programs are compiled for, rising; the last one is the decoder's budget.
        seconds: measured time of a round at each width, with all slots running.
        scope: "batch" takes the one width at which the running streams together get the most; "stream" lets each take
            its own best, and verifies in the smallest width that holds them all.

    Raises:
        KdjaxError: widths that do not rise from 0 or more, or without one positive time each.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    scope: Scope = "batch"

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in itertools.pairwise(self.widths))
        if not self.widths or self.widths[0] < 0 or not rising:
            raise KdjaxError(f"widths={self.widths} must rise from 0 or more: sort them and drop what is there twice")
        if len(self.seconds) != len(self.widths) or not all(0 < s < np.inf for s in self.seconds):
            raise KdjaxError(f"seconds={self.seconds} must have one positive time for each of widths={self.widths}")


def choose(policy: CostAware, tree: Tree, running: Bool[Array, "slots"]) -> tuple[Int[Array, "slots"], Int[Array, ""]]:
    """Nodes to keep of each slot's tree, and the index of the width to verify in."""
    rates = expected_tokens(tree)[:, np.asarray(policy.widths)] / np.asarray(policy.seconds, np.float32)[None, :]
    rates = jnp.where(running[:, None], rates, 0.0)
    widths = jnp.asarray(policy.widths, jnp.int32)
    if policy.scope == "batch":
        index = jnp.argmax(jnp.sum(rates, 0)).astype(jnp.int32)
        return jnp.broadcast_to(widths[index], running.shape), index
    own = jnp.argmax(rates, 1).astype(jnp.int32)
    return widths[own], jnp.max(own)


def expected_tokens(tree: Tree) -> Float[Array, "slots rows"]:
    """Tokens that a round is expected to commit where the first n nodes are verified, n = 0, 1, ...; bonus included.

    As the drafter sees it: the sum of the probabilities of the paths to root and nodes.
    """
    return jnp.cumsum(jnp.exp(tree.scores), axis=1)


def narrow(tree: Tree, budgets: Int[Array, "slots"], width: int) -> Tree:
    """The tree of the first `budgets[s]` nodes, in `width` + 1 rows: nodes come in the order of their score."""
    rows = jnp.arange(1 + width, dtype=jnp.int32)
    used = rows[None, :] <= jnp.minimum(budgets, tree.n_valid - 1)[:, None]

    def keep(values: Array, padding: int | float) -> Array:
        values = values[:, : 1 + width]
        return jnp.where(used, values, jnp.full_like(values, padding))

    alone = jnp.eye(1 + width, dtype=bool)[None]
    return Tree(
        tokens=keep(tree.tokens, 0),
        depths=keep(tree.depths, 0),
        parents=keep(tree.parents, -1),
        ancestors=jnp.where(used[:, :, None], tree.ancestors[:, : 1 + width, : 1 + width], alone),
        scores=keep(tree.scores, -np.inf),
        n_valid=jnp.sum(used, 1, dtype=jnp.int32),
    )
