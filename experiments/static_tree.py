"""A tree of one shape for all rounds (Sequoia, arXiv 2402.12374): ranks by how often they were right elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments import rounds
from kdjax.decode import Decoder, DFlash, Params, Request
from kdjax.decode.state import DecodeState
from kdjax.tree.marginals import top_k

Table = tuple[tuple[float, ...], ...]
"""Probability that the target takes the draft of a rank, by depth, given that it took the parent."""


@dataclasses.dataclass(frozen=True)
class StaticRanks(DFlash):
    """Gives the tokens of rank r at depth d the probability `table[d][r]`, whatever the drafter says of this round."""

    table: Table = ()

    def propose(self, params: Params, state: DecodeState) -> Float[Array, "slots depth vocab"]:
        logits = super().propose(params, state)
        p = np.asarray(self.table, np.float32)
        _, ids = top_k(logits, p.shape[1])
        others = np.minimum((1 - p.sum(1)) / (logits.shape[-1] - p.shape[1]), p[:, -1] / 2)
        low = jnp.broadcast_to(jnp.log(others)[None, :, None], logits.shape)
        top = jnp.broadcast_to(jnp.log(p)[None], ids.shape)
        return jnp.put_along_axis(low, ids, top, axis=-1, inplace=False)


def acceptance_by_rank(decoder: Decoder, requests: Sequence[Request], depth: int, ranks: int) -> Table:
    """Measured on the trees of `decoder`, one request at a time; smoothed, and falling with the rank."""
    tried, hit = np.zeros((depth, ranks)), np.zeros((depth, ranks))
    for request in requests:
        for _, seen in rounds.observe(decoder, [request]):
            for d, r, accepted in _drafts(seen):
                if r < ranks:
                    tried[d, r] += 1
                    hit[d, r] += accepted
    falling = np.minimum.accumulate((hit + 0.5) / (tried + 10.0), axis=1)
    falling *= (1 - 1e-4) ** np.arange(ranks)  # no ties: equal probabilities would be ordered by token id, not by rank
    return tuple(tuple(float(p) for p in row / max(1.0, row.sum() * 1.01)) for row in falling)


def _drafts(seen: rounds.Seen) -> Iterator[tuple[int, int, bool]]:
    """(depth - 1, rank among its siblings, accepted) of the nodes of stream 0 whose parent was accepted."""
    siblings: dict[int, int] = {}
    for node in range(1, int(seen.n_valid[0])):
        parent = int(seen.parents[0, node])
        rank = siblings.get(parent, 0)
        siblings[parent] = rank + 1
        if seen.on_path[0, parent]:
            yield int(seen.depths[0, node]) - 1, rank, bool(seen.on_path[0, node])
