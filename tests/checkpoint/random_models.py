"""Small random models with the traits of the real ones."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kdjax.checkpoint.int4 import encode
from kdjax.checkpoint.layout import Leaf, drafter_leaves, target_leaves
from kdjax.config import DrafterConfig, Int4Config, ModelConfig, YarnConfig

YARN = YarnConfig(factor=64.0, original_max_position_embeddings=64)

TARGET = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=12,
    intermediate_size=40,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=2,
    routed_scaling_factor=2.827,
    rope_scaling=YARN,
    max_position_embeddings=2048,
    experts_int4=Int4Config(group_size=32),
    bos_token_id=60,
    eos_token_ids=(61, 62),
    pad_token_id=63,
)

DRAFTER = DrafterConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    block_size=4,
    target_layer_ids=(0, 2),
    mask_token_id=59,
    num_target_layers=3,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=16,
    rope_scaling=YARN,
    max_position_embeddings=2048,
)


def random_params(leaves: list[Leaf], seed: int = 0) -> dict:
    """Float32 values that bfloat16 holds exactly (the router's bias: float32 values that it does not hold)."""
    rng = np.random.default_rng(seed)
    params: dict = {}
    for leaf in leaves:
        shape = (len(leaf.modules), *leaf.shape) if leaf.stacked else leaf.shape
        value = rng.normal(size=shape).astype(np.float32)
        node = params
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        if leaf.int4 is not None:
            node[leaf.path[-1]] = encode(value, leaf.int4.group_size, "max/7")
        else:
            node[leaf.path[-1]] = value + 7 if leaf.bias else value.astype(ml_dtypes.bfloat16).astype(np.float32)
    return params


def random_target(config: ModelConfig = TARGET) -> dict:
    return random_params(list(target_leaves(config, lambda module: config.experts_int4)))


def random_drafter(config: DrafterConfig = DRAFTER) -> dict:
    return random_params(list(drafter_leaves(config)))
