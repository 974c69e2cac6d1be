"""How every array is split over the mesh: the one table of path -> dimensions.

What is small and read by all (norms, the down-projections of attention, the router) is whole on every device; sharding
it would cost a collective per layer. Heads, vocabulary and widths are split so that each layer needs two all-reduces:
after the output projection of attention, and after the feed-forward part.
"""

from __future__ import annotations

from typing import Any

import msgspec
from jax.sharding import Mesh

from kdjax.config import DrafterConfig, MeshConfig, ModelConfig
from kdjax.model import k2
from kdjax.model.runtime import Runtime
from kdjax.model.sequence import BLOCK
from kdjax.sharding.rules import Rule, Split, partition, shardings
from pallas_kernels.int4_experts.layout import BLOCK_COLUMNS, BLOCK_ROWS


def target_rules(config: ModelConfig, mesh: MeshConfig, *, tiled: bool = False) -> tuple[Rule, ...]:
    """For params in the checkpoint layout, or with experts `tiled` for the INT4 kernels."""
    c, over = config, mesh.model_axes
    layer, attn, mlp = "layers.*", "layers.*.self_attn", "layers.*.mlp"
    rules = [
        Rule("embed_tokens.weight", (Split(over),)),
        Rule(f"{layer}.input_layernorm.weight"),
        Rule(f"{layer}.post_attention_layernorm.weight"),
        Rule(f"{attn}.q_a_proj.weight"),
        Rule(f"{attn}.q_a_layernorm.weight"),
        Rule(f"{attn}.q_b_proj.weight", (Split(over, c.qk_head_dim, "head"),)),
        Rule(f"{attn}.kv_a_proj_with_mqa.weight"),
        Rule(f"{attn}.kv_a_layernorm.weight"),
        Rule(f"{attn}.kv_b_proj.weight", (Split(over, c.qk_nope_head_dim + c.v_head_dim, "head"),)),
        Rule(f"{attn}.o_proj.weight", (None, Split(over, c.v_head_dim, "head"))),
        Rule("norm.weight"),
        Rule("lm_head.weight", (Split(over),)),
    ]
    if c.first_k_dense_replace:
        rules += _mlp_rules(mlp, over)
    if c.first_k_dense_replace < c.num_hidden_layers:
        rules += [Rule(f"{mlp}.gate.weight"), Rule(f"{mlp}.gate.e_score_correction_bias")]
        rules += _tile_rules(f"{mlp}.experts.tiles", mesh) if tiled else _expert_rules(f"{mlp}.experts", c, mesh)
        if c.n_shared_experts:
            rules += _mlp_rules(f"{mlp}.shared_experts", over)
    return tuple(rules)


def _mlp_rules(path: str, over: tuple[str, ...]) -> list[Rule]:
    return [
        Rule(f"{path}.gate_proj.weight", (Split(over),)),
        Rule(f"{path}.up_proj.weight", (Split(over),)),
        Rule(f"{path}.down_proj.weight", (None, Split(over))),
    ]


def _expert_rules(path: str, c: ModelConfig, mesh: MeshConfig) -> list[Rule]:
    """Stacks [experts, out, in]. Both halves of an expert are cut at whole scale groups of `down_proj`'s columns."""
    experts, group = Split(mesh.expert_axes), 1 if c.experts_int4 is None else c.experts_int4.group_size
    width = Split(mesh.expert_width_axes, group, "scale group")
    return [
        Rule(f"{path}.gate_proj.weight", (experts, width)),
        Rule(f"{path}.up_proj.weight", (experts, width)),
        Rule(f"{path}.down_proj.weight", (experts, None, width)),
    ]


def _tile_rules(path: str, mesh: MeshConfig) -> list[Rule]:
    """`pallas_kernels.int4_experts.TiledExperts`, cut between tiles: each part is what a device makes of its own."""
    experts, width = Split(mesh.expert_axes), mesh.expert_width_axes
    rows = (experts, Split(width, BLOCK_COLUMNS // BLOCK_ROWS, "tile"))
    columns = (experts, None, Split(width, 1, "tile"))
    return [
        Rule(f"{path}.gate_up_words", rows),
        Rule(f"{path}.gate_up_scales", rows),
        Rule(f"{path}.down_words", columns),
        Rule(f"{path}.down_scales", columns),
    ]


def drafter_rules(config: DrafterConfig, mesh: MeshConfig) -> tuple[Rule, ...]:
    """For params in the checkpoint layout. `fc` is cut along its output, so that its sums stay whole."""
    over, attn, head = mesh.drafter_axes, "layers.*.self_attn", config.head_dim
    heads = Split(over, head, "head")
    return (
        Rule("fc.weight", (Split(over),)),
        Rule("hidden_norm.weight"),
        Rule("layers.*.input_layernorm.weight"),
        Rule("layers.*.post_attention_layernorm.weight"),
        Rule(f"{attn}.q_proj.weight", (heads,)),
        Rule(f"{attn}.k_proj.weight", (heads,)),
        Rule(f"{attn}.v_proj.weight", (heads,)),
        Rule(f"{attn}.o_proj.weight", (None, heads)),
        Rule(f"{attn}.q_norm.weight"),
        Rule(f"{attn}.k_norm.weight"),
        *_mlp_rules("layers.*.mlp", over),
        Rule("norm.weight"),
    )


def kv_cache_rules(mesh: MeshConfig) -> tuple[Rule, ...]:
    """For `kdjax.model.cache.KVCache`: [slots, rows, width] per layer."""
    return Rule("latent.*", (None, Split(mesh.cache_axes, BLOCK, "block"))), Rule("lengths")


def draft_cache_rules(mesh: MeshConfig) -> tuple[Rule, ...]:
    """For `kdjax.drafter.DraftCache`: [slots, rows, kv_heads, head_dim] per layer."""
    heads = (None, None, Split(mesh.drafter_axes))
    return Rule("k.*", heads), Rule("v.*", heads)


def target_specs(params: Any, config: ModelConfig, mesh: MeshConfig, cuts: MeshConfig | None = None) -> Any:
    """PartitionSpecs of the target's params (arrays, or `kdjax.model.k2.abstract_params`).

    `cuts` says into how many parts these arrays are to be cut, where that is not what `mesh` says.

    Raises:
        KdjaxError: a dimension that the mesh cannot cut evenly; see `partition`.
    """
    tiled = any("tiles" in layer["mlp"].get("experts", ()) for layer in params["layers"].values())
    return partition(params, target_rules(config, mesh, tiled=tiled), cuts or mesh)


def drafter_specs(params: Any, config: DrafterConfig, mesh: MeshConfig) -> Any:
    """`target_specs` for the drafter (`kdjax.drafter.abstract_params`)."""
    return partition(params, drafter_rules(config, mesh), mesh)


def target_shardings(config: ModelConfig, runtime: Runtime, mesh: Mesh) -> Any:
    """`NamedSharding`s of the params as a loader reads them, before `kdjax.model.k2.arrange`."""
    as_stored = msgspec.structs.replace(runtime, backend="xla")
    return shardings(target_specs(k2.abstract_params(config, as_stored), config, runtime.mesh), mesh)
