"""DDTree: the draft tree, its builder and its acceptance. Pure functions, batched over slots, no loop, no host."""

from kdjax.tree.accept import Acceptance as Acceptance
from kdjax.tree.accept import accept as accept
from kdjax.tree.build import build as build
from kdjax.tree.build import chain as chain
from kdjax.tree.build import root_only as root_only
from kdjax.tree.build import select as select
from kdjax.tree.candidates import candidates as candidates
from kdjax.tree.candidates import check_budget as check_budget
from kdjax.tree.marginals import marginals as marginals
from kdjax.tree.marginals import merge_top_k as merge_top_k
from kdjax.tree.marginals import sharded_top_k as sharded_top_k
from kdjax.tree.tree import Tree as Tree
