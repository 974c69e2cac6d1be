"""From draft logits to a draft tree in three kernels: read the vocabulary, choose tokens, grow the tree."""

from pallas_kernels.draft_tree.grow import MOST_NODES as MOST_NODES
from pallas_kernels.draft_tree.grow import Grown as Grown
from pallas_kernels.draft_tree.grow import grow as grow
from pallas_kernels.draft_tree.vocabulary import TopK as TopK
from pallas_kernels.draft_tree.vocabulary import top_k as top_k
