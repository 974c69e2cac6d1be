"""Hugging Face `config.json` of the target and of the drafter, read strictly and written back.

A key that changes the computation is either read or required to hold the one value that kdjax implements; keys that
do not (initialisers, generation defaults, bookkeeping) are ignored.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import stat
from typing import Any, NamedTuple

from kdjax.checkpoint.header import shown, unique
from kdjax.config import DrafterConfig, Int4Config, ModelConfig, YarnConfig
from kdjax.errors import KdjaxError
from kdjax.output import write_text

TEXT_MODEL_TYPES = ("kimi_k2", "deepseek_v3")

# What the K2 forward pass takes for granted. An absent key means the value shown (the transformers default).
TARGET_ASSUMES: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "n_group": 1,
    "num_nextn_predict_layers": 0,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
DRAFTER_ASSUMES: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "model_type": "qwen3",
    "tie_word_embeddings": False,
}

TARGET_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "max_position_embeddings",
)
DRAFTER_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "block_size",
    "num_target_layers",
    "max_position_embeddings",
)

# Keys of a drafter that change nothing in its forward pass. Any other key is read or refused: a new one may well.
DRAFTER_IGNORES = frozenset(
    (
        "_name_or_path",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "max_window_layers",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)
DRAFTER_READS = frozenset(
    ("architectures", "dflash_config", "is_causal", "layer_types", "rms_norm_eps", "sliding_window")
    + ("rope_parameters", "rope_scaling", "rope_theta", "use_sliding_window")
)
ROPE_READS = frozenset(
    ("rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    + ("mscale", "mscale_all_dim", "attention_factor", "truncate", "partial_rotary_factor")
)

# What compressed-tensors writes. An unknown key may mean another order of nibbles or another meaning of scales.
QUANTIZATION_READS = frozenset(
    ("quant_method", "format", "quantization_status", "kv_cache_scheme", "ignore", "config_groups", "version")
    + ("global_compression_ratio", "sparsity_config", "transform_config")
)
GROUP_READS = frozenset(("targets", "input_activations", "output_activations", "weights", "format"))
WEIGHTS_READS = frozenset(
    ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder", "block_structure")
    + ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
)

# K2.6's own list without the vision entries: only routed experts are quantised.
IGNORE = (
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
)

# The epsilon of q_a_layernorm and kv_a_layernorm has no key: it is the class default of the modeling file.
LATENT_NORM_EPS = 1e-6


class Quantization(NamedTuple):
    """`quantization_config`: the INT4 layout and the module names or `re:` patterns that stay unquantised."""

    int4: Int4Config
    ignore: tuple[str, ...]


class _Keys:
    """One JSON object whose keys are fetched with checks; `where` prefixes the key in messages."""

    def __init__(self, file: pathlib.Path, values: dict[str, Any], where: str = ""):
        self.file, self.values, self.where = file, values, where

    def error(self, key: str, remedy: str) -> KdjaxError:
        shown = json.dumps(self.values[key]) if key in self.values else "missing"
        return KdjaxError(f"{self.file}: {self.where}{key} is {shown}: {remedy}")

    def get(self, key: str, kind: type | tuple[type, ...], what: str) -> Any:
        value = self.values.get(key)
        # bool is a subclass of int, and true is not a size.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"expected {what}")
        return value

    def integer(self, key: str, minimum: int = 1) -> int:
        value = self.get(key, int, f"an integer of at least {minimum}")
        if value < minimum:
            raise self.error(key, f"expected an integer of at least {minimum}")
        return value

    def optional_id(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key, 0)

    def number(self, key: str) -> float:
        value = float(self.get(key, (int, float), "a positive number"))
        if not (math.isfinite(value) and value > 0):
            raise self.error(key, "expected a positive number")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.get(key, list, "a list of integers")
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise self.error(key, "expected a list of integers")
        return tuple(value)

    def section(self, key: str) -> _Keys:
        return _Keys(self.file, self.get(key, dict, "an object"), f"{self.where}{key}.")

    def only(self, known: frozenset[str]) -> None:
        for key in self.values:
            if key not in known:
                raise self.error(key, "kdjax does not know this key, remove it if it does not change the computation")

    def assume(self, expected: dict[str, Any]) -> None:
        for key, value in expected.items():
            if key in self.values and self.values[key] != value:
                raise self.error(key, f"only {json.dumps(value)} is supported, use a checkpoint that has it")


def _read(file: pathlib.Path) -> _Keys:
    try:
        # A pipe would block for ever.
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise KdjaxError(f"{file} is not a regular file: download it again")
        values = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise KdjaxError(f"{file} does not exist: give the folder of a Hugging Face checkpoint") from None
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, KdjaxError):
            raise
        raise KdjaxError(f"{file} cannot be read as JSON ({shown(str(error))}): download it again") from None
    if not isinstance(values, dict):
        raise KdjaxError(f"{file} holds {type(values).__name__}, not an object: download it again")
    return _Keys(file, values)


def _theta(keys: _Keys) -> float:
    theta = keys.number("rope_theta")
    if theta <= 1:
        raise keys.error("rope_theta", "expected a number above 1, the base of the rotary periods")
    return theta


def _rope(keys: _Keys) -> tuple[float, YarnConfig | None]:
    """Theta and YaRN, from `rope_theta` + `rope_scaling` or from `rope_parameters` with theta nested inside."""
    if "rope_parameters" in keys.values:
        rope = keys.section("rope_parameters")
        theta = _theta(rope)
        for key, value in (("rope_theta", theta), ("rope_scaling", None)):
            if keys.values.get(key, value) != value:
                raise keys.error(key, "contradicts rope_parameters, remove one of the two")
    else:
        theta = _theta(keys)
        if keys.values.get("rope_scaling") is None:
            if "rope_scaling" not in keys.values:
                raise keys.error("rope_scaling", "state it, null for unscaled rotary embeddings")
            return theta, None
        rope = keys.section("rope_scaling")
    rope.only(ROPE_READS)
    rope.assume({"partial_rotary_factor": 1.0})
    kind_key = "type" if "type" in rope.values and "rope_type" not in rope.values else "rope_type"
    kind = rope.get(kind_key, str, 'one of "default", "yarn", "deepseek_yarn"')
    if kind == "default":
        return theta, None
    if kind not in ("yarn", "deepseek_yarn"):
        raise rope.error(kind_key, 'only "default", "yarn" and "deepseek_yarn" are supported')
    rope.assume({"truncate": True})
    factor = rope.number("factor")
    mscale = rope.number("mscale") if rope.values.get("mscale") else None
    all_dim = rope.number("mscale_all_dim") if rope.values.get("mscale_all_dim") else None
    if rope.values.get("attention_factor") is not None:
        amplitude = rope.number("attention_factor")
    elif mscale and all_dim:
        amplitude = None
    else:
        amplitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return theta, YarnConfig(
        factor=factor,
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast"),
        beta_slow=rope.number("beta_slow"),
        mscale=mscale or 1.0,
        # 0 leaves the softmax scale alone: m(0) = 1.
        mscale_all_dim=all_dim or 0.0,
        attention_factor=amplitude,
    )


def _write_rope(theta: float, yarn: YarnConfig | None, *, nested: bool) -> dict[str, Any]:
    if yarn is None:
        parameters: dict[str, Any] | None = {"rope_type": "default"} if nested else None
    else:
        parameters = {
            "rope_type" if nested else "type": "deepseek_yarn" if nested else "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
        if yarn.attention_factor is not None:
            parameters["attention_factor"] = yarn.attention_factor
    if nested:
        return {"rope_parameters": {"rope_theta": theta, **(parameters or {})}}
    return {"rope_theta": theta, "rope_scaling": parameters}


def _text_config(folder: pathlib.Path) -> tuple[_Keys, _Keys]:
    """The whole config and the part that describes the text model."""
    whole = _read(folder / "config.json")
    text = whole.section("text_config") if whole.values.get("model_type") == "kimi_k25" else whole
    if text.values.get("model_type") not in TEXT_MODEL_TYPES:
        raise text.error("model_type", "use a kimi_k25, kimi_k2 or deepseek_v3 checkpoint")
    return whole, text


def read_quantization(folder: pathlib.Path) -> Quantization | None:
    """`quantization_config` of the target, inside `text_config` (K2.6) or at top level; None where there is none.

    Raises:
        KdjaxError: another method or format than compressed-tensors `pack-quantized` symmetric 4 bit by groups.
    """
    whole, text = _text_config(folder)
    owner = text if text.values.get("quantization_config") is not None else whole
    if owner.values.get("quantization_config") is None:
        return None
    keys = owner.section("quantization_config")
    for key, value in {"quant_method": "compressed-tensors", "format": "pack-quantized"}.items():
        if keys.values.get(key) != value:
            raise keys.error(key, f"only {json.dumps(value)} is supported")
    keys.only(QUANTIZATION_READS)
    keys.assume({"kv_cache_scheme": None, "quantization_status": "compressed"})
    for key in ("sparsity_config", "transform_config"):
        if keys.values.get(key):
            raise keys.error(key, "not supported, use a checkpoint without it")
    groups = keys.section("config_groups")
    if len(groups.values) != 1:
        raise keys.error("config_groups", "exactly one group is supported")
    group = groups.section(next(iter(groups.values)))
    if group.values.get("targets") != ["Linear"]:
        raise group.error("targets", 'only ["Linear"] is supported')
    group.only(GROUP_READS)
    group.assume({"input_activations": None, "output_activations": None})
    if group.values.get("format") not in (None, "pack-quantized"):
        raise group.error("format", 'only "pack-quantized" is supported')
    weights = group.section("weights")
    weights.only(WEIGHTS_READS)
    for key, value in {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}.items():
        if weights.values.get(key) != value:
            raise weights.error(key, f"only {json.dumps(value)} is supported")
    weights.assume({"dynamic": False, "actorder": None, "block_structure": None})
    ignore = keys.get("ignore", list, "a list of module names and re: patterns")
    for pattern in map(str, ignore):
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise keys.error("ignore", f"{pattern} is no regular expression ({error})") from None
    return Quantization(Int4Config(group_size=weights.integer("group_size")), tuple(map(str, ignore)))


def _eos(keys: _Keys) -> tuple[int, ...] | None:
    value = keys.values.get("eos_token_id")
    if value is None:
        return None
    return (keys.integer("eos_token_id", 0),) if isinstance(value, int) else keys.integers("eos_token_id")


def read_model_config(folder: str | pathlib.Path) -> ModelConfig:
    """The target's configuration from `config.json` (wrapper `kimi_k25`, or bare `kimi_k2` / `deepseek_v3`).

    `eos_token_id` of `generation_config.json`, where present, takes precedence, as in transformers.

    Raises:
        KdjaxError: a missing key, a wrong type, or a value that the forward pass does not implement.
    """
    folder = pathlib.Path(folder)
    _, text = _text_config(folder)
    text.assume(TARGET_ASSUMES)
    if text.values.get("num_key_value_heads", text.values.get("num_attention_heads")) != text.values.get(
        "num_attention_heads"
    ):
        raise text.error("num_key_value_heads", "latent attention needs it equal to num_attention_heads")
    theta, yarn = _rope(text)
    quantization = read_quantization(folder)
    eos = _eos(text)
    if (folder / "generation_config.json").exists():
        eos = _eos(_read(folder / "generation_config.json")) or eos
    return ModelConfig(
        **{key: text.integer(key) for key in TARGET_SIZES},
        first_k_dense_replace=text.integer("first_k_dense_replace", 0),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        norm_topk_prob=text.get("norm_topk_prob", bool, "true or false"),
        rms_norm_eps=text.number("rms_norm_eps"),
        latent_norm_eps=LATENT_NORM_EPS,
        rope_theta=theta,
        rope_scaling=yarn,
        experts_int4=quantization.int4 if quantization else None,
        eos_token_ids=eos or (),
        bos_token_id=text.optional_id("bos_token_id"),
        pad_token_id=text.optional_id("pad_token_id"),
    )


def read_drafter_config(folder: str | pathlib.Path) -> DrafterConfig:
    """The configuration of a DFlash drafter in z-lab's layout.

    Nothing that shapes attention is defaulted: `layer_types`, `sliding_window`, `block_size`, `num_target_layers`,
    `dflash_config.target_layer_ids`, `dflash_config.mask_token_id` and the rotary keys must be there, and a key that is
    neither read nor known to change nothing is refused. An absent `is_causal` means what z-lab's code means by it:
    causal in sliding layers, bidirectional in full ones.

    Raises:
        KdjaxError: a missing key, a wrong type, or a value that the drafter does not implement.
    """
    keys = _read(pathlib.Path(folder) / "config.json")
    if "DFlashDraftModel" not in (keys.values.get("architectures") or []):
        raise keys.error("architectures", 'expected ["DFlashDraftModel"], give the folder of a DFlash drafter')
    keys.only(frozenset((*DRAFTER_READS, *DRAFTER_IGNORES, *DRAFTER_ASSUMES, *DRAFTER_SIZES)))
    keys.assume(DRAFTER_ASSUMES)
    dflash = keys.section("dflash_config")
    dflash.only(frozenset(("target_layer_ids", "mask_token_id")))
    layer_types = keys.get("layer_types", list, "one of full_attention, sliding_attention per layer")
    if bad := set(map(str, layer_types)) - {"full_attention", "sliding_attention"}:
        raise keys.error("layer_types", f"{sorted(bad)} is not supported, use full_attention or sliding_attention")
    window = None if keys.values.get("sliding_window") is None else keys.integer("sliding_window")
    if "sliding_attention" in layer_types and keys.values.get("use_sliding_window") is False:
        raise keys.error("use_sliding_window", "contradicts layer_types, set one of the two right")
    theta, yarn = _rope(keys)
    return DrafterConfig(
        **{key: keys.integer(key) for key in DRAFTER_SIZES},
        target_layer_ids=dflash.integers("target_layer_ids"),
        mask_token_id=dflash.integer("mask_token_id", 0),
        layer_types=tuple(layer_types),
        sliding_window=window,
        is_causal=keys.get("is_causal", bool, "true or false") if keys.values.get("is_causal") is not None else None,
        rms_norm_eps=keys.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=yarn,
    )


def _eos_json(config: ModelConfig) -> int | list[int] | None:
    ids = list(config.eos_token_ids)
    return ids[0] if len(ids) == 1 else ids or None


def _write_json(file: pathlib.Path, values: dict[str, Any]) -> None:
    write_text(file, json.dumps(values, indent=1) + "\n")


def quantization_json(int4: Int4Config, ignore: tuple[str, ...] = IGNORE) -> dict[str, Any]:
    """`quantization_config` of a checkpoint whose `Linear` modules are INT4 but for those that `ignore` matches."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": list(ignore),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": int4.group_size,
                    "dynamic": False,
                    "actorder": None,
                    "observer": "minmax",
                    "block_structure": None,
                },
            }
        },
    }


def write_model_config(
    folder: str | pathlib.Path, config: ModelConfig, *, wrapper: bool = False, ignore: tuple[str, ...] = IGNORE
) -> None:
    """Write `config.json` and `generation_config.json` so that `read_model_config` returns `config`.

    A bare `kimi_k2` text config, or with `wrapper` K2.6's `kimi_k25` object around it (without `vision_config`).
    `ignore` is `quantization_config.ignore`.

    Raises:
        KdjaxError: `latent_norm_eps` is not the class default, for which config.json has no key.
    """
    if config.latent_norm_eps != LATENT_NORM_EPS:
        raise KdjaxError(f"latent_norm_eps={config.latent_norm_eps} has no config.json key: use {LATENT_NORM_EPS}")
    folder = pathlib.Path(folder)
    special = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _eos_json(config),
        "pad_token_id": config.pad_token_id,
    }
    text: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "dtype": "bfloat16",
        **special,
        **{key: getattr(config, key) for key in TARGET_SIZES},
        "num_key_value_heads": config.num_attention_heads,
        "first_k_dense_replace": config.first_k_dense_replace,
        "routed_scaling_factor": config.routed_scaling_factor,
        "norm_topk_prob": config.norm_topk_prob,
        "rms_norm_eps": config.rms_norm_eps,
        **_write_rope(config.rope_theta, config.rope_scaling, nested=False),
        **TARGET_ASSUMES,
    }
    if config.experts_int4 is not None:
        text["quantization_config"] = quantization_json(config.experts_int4, ignore)
    if wrapper:
        text = {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
            **special,
            "text_config": text,
        }
    _write_json(folder / "config.json", text)
    _write_json(
        folder / "generation_config.json",
        {"max_length": config.max_position_embeddings, "eos_token_id": _eos_json(config)},
    )


def write_drafter_config(folder: str | pathlib.Path, config: DrafterConfig) -> None:
    """Write `config.json` so that `read_drafter_config` returns `config`, in z-lab's current layout."""
    values: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "dtype": "bfloat16",
        **{key: getattr(config, key) for key in DRAFTER_SIZES},
        "dflash_config": {"target_layer_ids": list(config.target_layer_ids), "mask_token_id": config.mask_token_id},
        "layer_types": list(config.layer_types),
        "use_sliding_window": "sliding_attention" in config.layer_types,
        "sliding_window": config.sliding_window,
        "rms_norm_eps": config.rms_norm_eps,
        **_write_rope(config.rope_theta, config.rope_scaling, nested=True),
        **DRAFTER_ASSUMES,
    }
    if config.is_causal is not None:
        values["is_causal"] = config.is_causal
    _write_json(pathlib.Path(folder) / "config.json", values)
