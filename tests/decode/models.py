"""Tiny random models and scripted drafters for the decode loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from kdjax.checkpoint import Drafter, Target
from kdjax.config import ONE_DEVICE, DrafterConfig, MeshConfig, ModelConfig
from kdjax.decode import Completion, DFlash, Params, Request
from kdjax.decode.state import DecodeState
from kdjax.drafter import abstract_params as abstract_drafter
from kdjax.drafter import arrange as arrange_drafter
from kdjax.model import k2
from kdjax.model.runtime import CPU_EXACT as RUNTIME
from kdjax.sharding import Rule, Split

MODEL = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    intermediate_size=32,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=256,
)
AS_STORED = msgspec.structs.replace(RUNTIME, layout="checkpoint")  # "fused" holds experts twice: not to be drawn twice
BLOCK = 8
MASK = 47
DRAFTER = DrafterConfig(
    vocab_size=48,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=32,
    block_size=BLOCK,
    target_layer_ids=(0, 1),
    mask_token_id=MASK,
    num_target_layers=2,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=8,
    max_position_embeddings=256,
)


def randomise(abstract: Any, seed: int) -> Any:
    """Normal values scaled so that logits spread over a few units and greedy text is not constant."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        names = [str(getattr(k, "key", k)) for k in path]
        if leaf.ndim == 1:
            value = np.ones(leaf.shape) if "bias" not in names[-1] else rng.normal(size=leaf.shape) * 0.1
        else:
            value = rng.normal(size=leaf.shape) * (1.0 if "embed_tokens" in names else 2.0 * leaf.shape[-1] ** -0.5)
        return jnp.asarray(value.astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(draw, abstract)


def stored_params(seed: int = 0) -> k2.Params:
    """As a checkpoint has them, which is also as the reference takes them."""
    return randomise(k2.abstract_params(MODEL, AS_STORED), seed)


def target(seed: int = 0) -> Target:
    return Target(MODEL, k2.arrange(stored_params(seed), MODEL, RUNTIME))


def drafter(seed: int = 1) -> Drafter:
    return Drafter(DRAFTER, arrange_drafter(randomise(abstract_drafter(DRAFTER, AS_STORED), seed), RUNTIME))


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A drafter that reads its logits from a table in the params: `table[r, p]` for request r with its root at position
    p. The request is known by its seed. Positions beyond the table repeat its last row. On a mesh the table is split
    like the vocabulary."""

    depth: int
    taps: tuple[int, ...] = ()
    mesh: MeshConfig = ONE_DEVICE
    state_rules = ()

    @property
    def param_rules(self) -> tuple[Rule, ...]:
        return (Rule("", (None, None, None, Split(self.mesh.model_axes))),)

    def empty(self, slots: int, capacity: int) -> None:
        return None

    def propose(self, params: Params, state: DecodeState) -> jax.Array:
        return look_up(params.drafter, state)

    def append(self, params: Params, drafter: None, taps: Any, positions: Any, n_valid: Any) -> None:
        return None


@dataclasses.dataclass(frozen=True)
class Switched(DFlash):
    """DFlash, or a script: one compiled program serves random, perfect and adversarial drafters."""

    def propose(self, params: Params, state: DecodeState) -> jax.Array:
        scripted = look_up(params.drafter["table"], state)
        return jnp.where(params.drafter["scripted"], scripted, super().propose(self.own(params), state))

    def append(self, params: Params, *args: Any) -> Any:
        return super().append(self.own(params), *args)

    def own(self, params: Params) -> Params:
        return Params(params.target, params.drafter["dflash"])


def look_up(table: jax.Array, state: DecodeState) -> jax.Array:
    row = jnp.minimum(state.cache.lengths, table.shape[1] - 1)
    return table[state.seed.astype(jnp.int32), row].astype(jnp.float32)


def perfect_table(texts: Sequence[Sequence[int]], positions: int) -> np.ndarray:
    """Draft logits that give each request its own true text (prompt and continuation) from any root position."""
    table = np.zeros((len(texts), positions, BLOCK - 1, MODEL.vocab_size), np.float32)
    for r, text in enumerate(texts):
        for p in range(positions):
            for d, token in enumerate(text[p + 1 : p + BLOCK]):
                table[r, p, d, token] = 10.0
    return table


def text_of(request: Request, completion: Completion) -> list[int]:
    return [*request.prompt_ids, *completion.token_ids]
