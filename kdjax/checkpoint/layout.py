"""Which matrix lives under which name: the Hugging Face names, shapes and storage of both models.

One table serves the reader, which checks a checkpoint against it before any weight is read, and the writer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from kdjax.config import DrafterConfig, Int4Config, ModelConfig
from kdjax.errors import KdjaxError

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(np.bool_),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "U8": np.dtype(np.uint8),
}


class Stored(NamedTuple):
    """Shape and safetensors dtype of one tensor; the first dtype is the one that is written.

    `value` is the content where the config determines it (`weight_shape`).
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    value: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtypes[0]].itemsize


class Leaf(NamedTuple):
    """One array of the params: its path there, and the modules (one, or one per expert) whose tensors it stacks.

    `int4` is None for a plain array. `bias` marks the router's `e_score_correction_bias`, the only leaf that is not
    a `weight`.
    """

    path: tuple[str | int, ...]
    modules: tuple[str, ...]
    shape: tuple[int, ...]
    int4: Int4Config | None = None
    bias: bool = False

    @property
    def stacked(self) -> bool:
        return "experts" in self.path

    def tensors(self, module: str) -> dict[str, Stored]:
        """Every tensor that `module` has on disk."""
        if self.bias:
            # bf16 leaves few distinct values near 7, where trained biases sit, and would change the routing.
            return {f"{module}.e_score_correction_bias": Stored(self.shape, ("F32",))}
        if self.int4 is None:
            return {f"{module}.weight": Stored(self.shape, ("BF16", "F32"))}
        rows, columns = self.shape
        return {
            f"{module}.weight_packed": Stored((rows, -(-columns // 8)), ("I32",)),
            f"{module}.weight_scale": Stored((rows, columns // self.int4.group_size), ("BF16",)),
            f"{module}.weight_shape": Stored((2,), ("I32", "I64"), value=self.shape),
        }


def _mlp(width: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        "gate_proj": (intermediate, width),
        "up_proj": (intermediate, width),
        "down_proj": (width, intermediate),
    }


def _target_layer(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    width, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    modules: dict[str, tuple[int, ...]] = {
        "input_layernorm": (width,),
        "self_attn.q_a_proj": (config.q_lora_rank, width),
        "self_attn.q_a_layernorm": (config.q_lora_rank,),
        "self_attn.q_b_proj": (heads * config.qk_head_dim, config.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa": (config.latent_dim, width),
        "self_attn.kv_a_layernorm": (rank,),
        "self_attn.kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), rank),
        "self_attn.o_proj": (width, heads * config.v_head_dim),
        "post_attention_layernorm": (width,),
    }
    if not config.is_moe(layer):
        return modules | {f"mlp.{k}": v for k, v in _mlp(width, config.intermediate_size).items()}
    shared = _mlp(width, config.n_shared_experts * config.moe_intermediate_size)
    return (
        modules
        | {"mlp.gate": (config.n_routed_experts, width)}
        | {f"mlp.shared_experts.{k}": v for k, v in shared.items()}
    )


def target_leaves(config: ModelConfig, int4_of: Callable[[str], Int4Config | None]) -> Iterator[Leaf]:
    """Every array of the target, in layer order. `int4_of(module)` says how a routed expert's matrix is stored.

    Raises:
        KdjaxError: the experts of one layer are stored in different ways, or a width does not fit the group size.
    """
    yield Leaf(("embed_tokens", "weight"), ("model.embed_tokens",), (config.vocab_size, config.hidden_size))
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for module, shape in _target_layer(config, layer).items():
            yield Leaf(("layers", layer, *module.split("."), "weight"), (f"{prefix}.{module}",), shape)
        if not config.is_moe(layer):
            continue
        gate = ("layers", layer, "mlp", "gate", "e_score_correction_bias")
        yield Leaf(gate, (f"{prefix}.mlp.gate",), (config.n_routed_experts,), bias=True)
        for projection, shape in _mlp(config.hidden_size, config.moe_intermediate_size).items():
            modules = tuple(f"{prefix}.mlp.experts.{e}.{projection}" for e in range(config.n_routed_experts))
            storage = {int4_of(module) for module in modules}
            if len(storage) > 1:
                raise KdjaxError(
                    f"{prefix}.mlp.experts: {projection} is INT4 in some experts and not in others: "
                    "make `ignore` cover all experts of a layer or none"
                )
            (int4,) = storage
            if int4 is not None and shape[1] % int4.group_size:
                raise KdjaxError(
                    f"{prefix}.mlp.experts: {projection} has {shape[1]} columns, not a multiple of "
                    f"group_size={int4.group_size}: use a group size that divides it"
                )
            path = ("layers", layer, "mlp", "experts", projection, "weight")
            yield Leaf(path, modules, shape, int4)
    yield Leaf(("norm", "weight"), ("model.norm",), (config.hidden_size,))
    yield Leaf(("lm_head", "weight"), ("lm_head",), (config.vocab_size, config.hidden_size))


def drafter_leaves(config: DrafterConfig) -> Iterator[Leaf]:
    """Every array of the drafter, which has neither an embedding nor an lm_head of its own."""
    width, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    yield Leaf(("fc", "weight"), ("fc",), (width, len(config.target_layer_ids) * width))
    yield Leaf(("hidden_norm", "weight"), ("hidden_norm",), (width,))
    modules: dict[str, tuple[int, ...]] = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "post_attention_layernorm": (width,),
        **{f"mlp.{k}": v for k, v in _mlp(width, config.intermediate_size).items()},
    }
    for layer in range(config.num_hidden_layers):
        for module, shape in modules.items():
            yield Leaf(("layers", layer, *module.split("."), "weight"), (f"layers.{layer}.{module}",), shape)
    yield Leaf(("norm", "weight"), ("norm",), (width,))


def is_ignored(module: str, ignore: tuple[str, ...]) -> bool:
    """compressed-tensors' rule: an exact module name, or after `re:` a regular expression matched from the start."""
    names = (module, f"language_model.{module}")
    return any(
        any(re.match(pattern[3:], name) for name in names) if pattern.startswith("re:") else pattern in names
        for pattern in ignore
    )
