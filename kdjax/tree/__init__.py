"""DDTree: the draft tree, its builder and its acceptance. Pure functions, batched over slots, no loop, no host."""

from kdjax.tree.accept import Acceptance, accept
from kdjax.tree.build import build, chain, root_only, select
from kdjax.tree.candidates import candidates
from kdjax.tree.marginals import marginals, merge_top_k, sharded_top_k
from kdjax.tree.tree import Tree

__all__ = [
    "Acceptance",
    "Tree",
    "accept",
    "build",
    "candidates",
    "chain",
    "marginals",
    "merge_top_k",
    "root_only",
    "select",
    "sharded_top_k",
]
