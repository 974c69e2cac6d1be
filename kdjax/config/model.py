"""Configuration of the target model and of the drafter, with the names of their Hugging Face `config.json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kdjax.errors import KdjaxError

LayerType = Literal["full_attention", "sliding_attention"]


class YarnConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """YaRN rotary scaling (config key `rope_scaling` / `rope_parameters`).

    `attention_factor` multiplies cos and sin; None means the ratio m(mscale) / m(mscale_all_dim).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    attention_factor: float | None = None


class Int4Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """compressed-tensors `pack-quantized`: symmetric signed 4 bit, one bf16 scale per `group_size` input columns."""

    group_size: int = 32


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Kimi-K2 / DeepSeek-V3 text model. Hashable, so it can be a static argument of `jax.jit`.

    Fields are named like the keys of a Hugging Face `config.json`. `latent_norm_eps` is the epsilon of `q_a_layernorm`
    and `kv_a_layernorm`: 1e-6 in Moonshot's modeling file, whatever `rms_norm_eps` says. `experts_int4` is None where
    routed experts are stored as bf16; `max_position_embeddings` is the longest context, in tokens.

    Raises:
        KdjaxError: more experts per token than there are, or an odd rotary dimension.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6
    rope_theta: float = 50000.0
    rope_scaling: YarnConfig | None = None
    max_position_embeddings: int = 4096
    experts_int4: Int4Config | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_experts_per_tok > self.n_routed_experts:
            raise KdjaxError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds n_routed_experts={self.n_routed_experts}: "
                "lower the first or raise the second"
            )
        if self.qk_rope_head_dim % 2:
            raise KdjaxError(f"qk_rope_head_dim={self.qk_rope_head_dim} is odd: rotary pairs need an even size")

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or materialised key head: the part without position, then the rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of one cache row: the normed latent, then the rotated shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe(self, layer: int) -> bool:
        """Whether this layer (0-based) has routed experts; the first `first_k_dense_replace` have one dense MLP."""
        return layer >= self.first_k_dense_replace


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A DFlash block-diffusion drafter (Qwen3-style layers). Hashable.

    Fields are named like the keys of its `config.json` and of the `dflash_config` in it. `block_size` counts the bonus
    token, so a round drafts one less. `target_layer_ids` are 0-based layers of a target with `num_target_layers`.
    `is_causal` overrides the in-block causality of every layer; None means causal in sliding layers and bidirectional
    in full ones. `sliding_window` is in tokens.

    Raises:
        KdjaxError: fields that contradict each other.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_target_layers: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 50000.0
    rope_scaling: YarnConfig | None = None
    max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise KdjaxError(
                f"layer_types has {len(self.layer_types)} entries for num_hidden_layers={self.num_hidden_layers}: "
                "give one per layer"
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise KdjaxError("layer_types has sliding_attention but sliding_window is not set: set it")
        if self.num_attention_heads % self.num_key_value_heads:
            raise KdjaxError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.mask_token_id >= self.vocab_size:
            raise KdjaxError(
                f"mask_token_id={self.mask_token_id} is outside the vocabulary of {self.vocab_size}: use a row of it"
            )
        if bad := [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]:
            raise KdjaxError(
                f"target_layer_ids {bad} lie outside the target's {self.num_target_layers} layers: ids are 0-based"
            )

    def window(self, layer: int) -> int | None:
        """How far back a query of this layer sees context keys (distance < window); None sees all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def causal_in_block(self, layer: int) -> bool:
        """Whether a position of the block sees only itself and the positions before it, in this layer."""
        return self.layer_types[layer] == "sliding_attention" if self.is_causal is None else self.is_causal


class DrafterOverrides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What published drafters leave open or runtimes disagree about; None keeps what the checkpoint says.

    `attention_factor` multiplies cos and sin: 1.0 by the ratio of the mscale keys, 1.41589 by vLLM up to 0.29 for
    Kimi-K2.5-DFlash. A `sliding_window` takes effect in sliding layers only.
    """

    is_causal: bool | None = None
    sliding_window: Annotated[int, msgspec.Meta(ge=1)] | None = None
    attention_factor: Annotated[float, msgspec.Meta(gt=0)] | None = None

    def apply(self, config: DrafterConfig) -> DrafterConfig:
        """Raises KdjaxError where the drafter has nothing that an override changes."""
        if self.sliding_window is not None and "sliding_attention" not in config.layer_types:
            raise KdjaxError(f"sliding_window={self.sliding_window}: the drafter has no sliding layers, leave it out")
        changed: dict[str, Any] = {name: getattr(self, name) for name in ("is_causal", "sliding_window")}
        if self.attention_factor is not None:
            if config.rope_scaling is None:
                raise KdjaxError(f"attention_factor={self.attention_factor}: the drafter has no YaRN, leave it out")
            changed["rope_scaling"] = msgspec.structs.replace(
                config.rope_scaling, attention_factor=self.attention_factor
            )
        return msgspec.structs.replace(config, **{name: value for name, value in changed.items() if value is not None})
