"""Bytes that one device holds, from the shapes of the real arrays and the table that splits them."""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from kdjax import drafter as dflash
from kdjax.config import DrafterConfig, MeshConfig, ModelConfig, ModelPair
from kdjax.model import k2
from kdjax.model.cache import KVCache
from kdjax.model.runtime import Runtime
from kdjax.sharding import draft_cache_rules, drafter_specs, kv_cache_rules, partition, target_specs
from kdjax.sharding.rules import dotted

RUNTIME = Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16")


class Workload(NamedTuple):
    """`streams` sequences of `context` committed tokens each, drafted by trees of `budget` nodes, root not counted."""

    context: int
    streams: int
    budget: int

    @property
    def tokens(self) -> int:
        """Rows of one verify forward."""
        return self.streams * (self.budget + 1)


class Memory(NamedTuple):
    """Bytes on one device. `target` and `drafter` are weights by component; `workspace` is an estimate.

    `workspace` counts what a verify forward has alive at its widest: float32 logits and their order, residual stream
    and taps, and the inner activations of every token's experts.
    """

    target: dict[str, int]
    drafter: dict[str, int]
    kv_cache: int
    drafter_cache: int
    workspace: int

    @property
    def total(self) -> int:
        """Bytes of all components."""
        return sum((*self.target.values(), *self.drafter.values(), self.kv_cache, self.drafter_cache, self.workspace))


def memory(pair: ModelPair, mesh: MeshConfig, workload: Workload) -> Memory:
    """What weights, caches and one step take on each device of `mesh`, in bfloat16 with INT4 experts as configured.

    Raises:
        KdjaxError: the mesh cannot cut the model evenly.
    """
    target, drafter = pair.target, pair.drafter if workload.budget else None  # nothing drafts at budget 0
    params = k2.abstract_params(target, RUNTIME)
    weights = _by_component(params, target_specs(params, target, mesh), mesh, lambda path: _target_part(path, target))
    parts = mesh.size(mesh.cache_axes)
    cache = jax.eval_shape(
        lambda: KVCache.empty(
            target, workload.streams, workload.context, workload.budget + 1, RUNTIME.cache_dtype, parts
        )
    )
    kv = sum(_by_component(cache, partition(cache, kv_cache_rules(mesh), mesh), mesh, lambda path: "cache").values())
    draft_weights: dict[str, int] = {}
    draft_cache = 0
    if drafter is not None:
        params = dflash.abstract_params(drafter, RUNTIME)
        draft_weights = _by_component(params, drafter_specs(params, drafter, mesh), mesh, _drafter_part)
        cache = jax.eval_shape(
            lambda: dflash.DraftCache.empty(drafter, workload.streams, workload.context, RUNTIME.cache_dtype)
        )
        specs = partition(cache, draft_cache_rules(mesh), mesh)
        draft_cache = sum(_by_component(cache, specs, mesh, lambda path: "cache").values())
    return Memory(weights, draft_weights, kv, draft_cache, _workspace(target, drafter, mesh, workload.tokens))


def _by_component(tree: Any, specs: Any, mesh: MeshConfig, component: Any) -> dict[str, int]:
    found: dict[str, int] = collections.defaultdict(int)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    split = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    for (path, leaf), spec in zip(leaves, split, strict=True):
        parts = math.prod(mesh.size((axes,) if isinstance(axes, str) else axes) for axes in spec if axes)
        found[component(dotted(path))] += math.prod(leaf.shape) * leaf.dtype.itemsize // parts
    return dict(found)


def _target_part(path: str, config: ModelConfig) -> str:
    parts = path.split(".")
    if parts[0] != "layers":
        return {"norm": "norms"}.get(parts[0], parts[0])
    if parts[2] == "self_attn":
        return "attention"
    if parts[2] != "mlp":
        return "norms"
    if not config.is_moe(int(parts[1])):
        return "dense_mlp"
    return {"gate": "router", "experts": "routed_experts"}.get(parts[3], parts[3])


def _drafter_part(path: str) -> str:
    parts = path.split(".")
    if parts[0] != "layers":
        return {"fc": "fc"}.get(parts[0], "norms")
    return {"self_attn": "attention", "mlp": "mlp"}.get(parts[2], "norms")


def _workspace(target: ModelConfig, drafter: DrafterConfig | None, mesh: MeshConfig, tokens: int) -> int:
    logits = 2 * 4 * target.vocab_size // mesh.size(mesh.model_axes)
    taps = len(drafter.target_layer_ids) if drafter else 0
    stream = 2 * (taps + 4) * target.hidden_size
    inner = target.moe_intermediate_size // mesh.size(mesh.expert_width_axes)
    experts = target.num_experts_per_tok * (2 * 3 * inner + 4 * target.hidden_size)
    return tokens * (logits + stream + experts)
