"""A golden case that can be cut eight ways in every direction; its truth is the NumPy reference in float64."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import numpy as np

from kdjax.checkpoint import save_target
from kdjax.config import DrafterConfig, Int4Config, MeshConfig, ModelConfig
from kdjax.reference import loop as reference
from kdjax.reference import model
from kdjax.reference.checkpoint import read_target
from tests.checkpoint.random_models import YARN, random_target

MODEL = ModelConfig(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=8,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    intermediate_size=64,
    moe_intermediate_size=256,
    n_routed_experts=8,
    num_experts_per_tok=2,
    rope_scaling=YARN,
    max_position_embeddings=256,
    experts_int4=Int4Config(group_size=32),
)
DRAFTER = DrafterConfig(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=8,
    intermediate_size=64,
    block_size=8,
    target_layer_ids=(1, 0),
    mask_token_id=127,
    num_target_layers=2,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=8,
    max_position_embeddings=256,
)
MESHES = [
    *(MeshConfig(tensor=n) for n in (2, 4, 8)),
    *(MeshConfig(expert=n) for n in (2, 4, 8)),
    *(MeshConfig(tensor=t, expert=e) for t, e in ((2, 2), (2, 4), (4, 2))),
    MeshConfig(tensor=2, expert=4, outside_experts="replicated"),
]
NEW, DEPTH, POSITIONS, BUDGET = 24, 7, 64, 8
PROMPTS = ((5, 9, 31, 2, 2, 17, 40), tuple(range(20, 40)))


class Case(NamedTuple):
    folder: pathlib.Path
    logits: list[np.ndarray]
    """Of every prompt token."""
    table: np.ndarray
    """Draft logits [prompt, position of the root, depth, vocab]: the truth, now and then drowned in noise."""
    truth: list[reference.Generation]


class Table:
    """`reference.Proposer` of one prompt."""

    taps: tuple[int, ...] = ()

    def __init__(self, table: np.ndarray):
        self.table = table

    def propose(self, root: int, start: int, new_taps: np.ndarray) -> np.ndarray:
        return self.table[start]


def make(folder: pathlib.Path) -> Case:
    params = random_target(MODEL)
    for name in ("embed_tokens", "lm_head"):  # logits of a few units
        params[name]["weight"] = params[name]["weight"] * np.float32(0.5)
    save_target(folder, MODEL, params, wrapper=True)
    target = reference.Target(*read_target(folder))
    rng = np.random.default_rng(11)
    table = rng.normal(size=(len(PROMPTS), POSITIONS, DEPTH, MODEL.vocab_size)).astype(np.float32)
    logits, truth = [], []
    for r, prompt in enumerate(PROMPTS):
        positions = np.arange(len(prompt))
        out = model.forward(target.params, MODEL, np.array(prompt), positions, model.empty_cache(MODEL))
        logits.append(model.logits(target.params, out.hidden))
        plain = reference.generate(target, None, prompt, NEW + DEPTH, "autoregressive")
        text = [*prompt, *plain.token_ids]
        for p in range(len(prompt), POSITIONS):
            for d, token in enumerate(text[p + 1 : p + 1 + DEPTH]):
                table[r, p, d, token] += 4.5
        truth.append(reference.generate(target, Table(table[r]), prompt, NEW, "tree", BUDGET))
    return Case(folder, logits, table, truth)
