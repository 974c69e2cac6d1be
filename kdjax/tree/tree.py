"""The draft tree as a value: rows of one verify forward, root first, padded to a static size."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """Rows of the verify forward of each slot. A parent always comes before its children.

    Rows at or beyond `n_valid` are padding: token 0, parent -1, depth 0, visible to themselves alone.
    """

    # Any: as a pytree it also carries argument infos in place of its arrays.
    tokens: Any
    """[*slots, rows]: token of each row; row 0 is the root, the token the target has chosen but not yet read."""
    depths: Any
    """[*slots, rows]: distance from the root: the row's position is the root's plus this. Siblings share it."""
    parents: Any
    """[*slots, rows]: row of the parent, -1 for the root."""
    ancestors: Any
    """Bool [*slots, rows, rows]: row i sees row j, that is j is i itself or one of its ancestors."""
    scores: Any
    """float32 [*slots, rows]: log-probability of the path under the drafter, 0 for the root, -inf for padding."""
    n_valid: Any
    """[*slots]: rows in use, the root included."""

    def positions(self, starts: Int[Array, "slots"]) -> Int[Array, "slots rows"]:
        """Absolute positions of the rows where the root of slot s is at `starts[s]`."""
        return starts[:, None] + self.depths
