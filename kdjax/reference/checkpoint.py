"""Reads a Hugging Face folder of a Kimi-K2 target or a DFlash drafter into float64 arrays, all in memory at once."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from safetensors import SafetensorError, deserialize

from kdjax.config import DrafterConfig, Int4Config, ModelConfig, YarnConfig
from kdjax.errors import KdjaxError
from kdjax.reference import int4
from kdjax.reference.rope import yarn_mscale

Params = dict[Any, Any]

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
}
"""What weights, packed words and shapes are stored as."""


def read_target(folder: str | pathlib.Path, rounding: int4.Rounding = "bfloat16") -> tuple[ModelConfig, Params]:
    """Config and weights of a `kimi_k25` wrapper or a bare `kimi_k2` / `deepseek_v3` folder; vision is skipped.

    Params are nested dicts named like the checkpoint, with layer numbers as integer keys and the routed experts of a
    layer stacked to [experts, out, in]. `rounding` says how INT4 products are rounded, see `int4.dequantise`.
    """
    raw = _config(folder)
    raw = raw | raw.get("text_config", {})
    quantised = raw.get("quantization_config")
    config = ModelConfig(
        **_fields(ModelConfig, raw),
        rope_scaling=_yarn(raw),
        experts_int4=quantised and Int4Config(group_size=_group_size(quantised)),
        eos_token_ids=tuple(np.atleast_1d(raw.get("eos_token_id", ())).tolist()),
    )

    def keep(name: str) -> str | None:
        name = name.removeprefix("language_model.")
        return None if name.startswith(("vision_tower.", "mm_projector.")) else name.removeprefix("model.")

    params = _nest(_tensors(folder, keep))
    group_size = config.experts_int4.group_size if config.experts_int4 else 0

    def dense(matrix: Params) -> np.ndarray:
        if "weight_packed" not in matrix:
            return matrix["weight"].astype(np.float64)
        columns = int(matrix["weight_shape"][1])
        return int4.dequantise(matrix["weight_packed"], matrix["weight_scale"], columns, group_size, rounding)

    for layer in params["layers"].values():
        if experts := layer["mlp"].get("experts"):
            layer["mlp"]["experts"] = {
                name: {"weight": np.stack([dense(experts[e][name]) for e in range(config.n_routed_experts)])}
                for name in ("gate_proj", "up_proj", "down_proj")
            }
    return config, _widen(params)


def read_drafter(folder: str | pathlib.Path) -> tuple[DrafterConfig, Params]:
    """Config and weights of a DFlash folder (no `model.` prefix, no embedding, no lm_head)."""
    raw = _config(folder)
    raw = raw | raw["dflash_config"]
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    raw["rope_theta"] = scaling.get("rope_theta", raw.get("rope_theta"))
    config = DrafterConfig(
        **_fields(DrafterConfig, raw | {key: tuple(raw[key]) for key in ("layer_types", "target_layer_ids")}),
        rope_scaling=_yarn(raw),
    )
    return config, _widen(_nest(_tensors(folder, lambda name: name)))


def _config(folder: str | pathlib.Path) -> dict[str, Any]:
    return json.loads((pathlib.Path(folder) / "config.json").read_text())


def _fields(kind: type[msgspec.Struct], raw: dict[str, Any]) -> dict[str, Any]:
    derived = {"rope_scaling", "experts_int4", "eos_token_ids"}
    return {name: raw[name] for name in kind.__struct_fields__ if name in raw and name not in derived}


def _yarn(raw: dict[str, Any]) -> YarnConfig | None:
    """`rope_scaling`, or `rope_parameters` of newer writers; "deepseek_yarn" is yarn under another name.

    Without the mscale keys YaRN's own amplitude m(1) applies and the softmax scale is left alone (mscale_all_dim 0).
    """
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("yarn", "deepseek_yarn"):
        raise KdjaxError(f"rope type {kind!r} is not supported: use yarn, deepseek_yarn or default")
    if not (scaling.get("mscale") and scaling.get("mscale_all_dim")):
        scaling["attention_factor"] = scaling.get("attention_factor") or yarn_mscale(scaling["factor"], 1.0)
        scaling["mscale_all_dim"] = scaling.get("mscale_all_dim", 0.0)
    return YarnConfig(**{name: scaling[name] for name in YarnConfig.__struct_fields__ if name in scaling})


def _group_size(quantised: dict[str, Any]) -> int:
    weights = quantised["config_groups"]["group_0"]["weights"]
    if quantised["format"] != "pack-quantized" or weights["num_bits"] != 4 or not weights["symmetric"]:
        raise KdjaxError(f"quantization {quantised['format']!r}, {weights} is not symmetric pack-quantized INT4")
    return weights["group_size"]


def _tensors(folder: str | pathlib.Path, keep: Callable[[str], str | None]) -> Iterator[tuple[str, np.ndarray]]:
    """(kept name, array) of the tensors that the index lists, or of the one file where there is no index."""
    folder = pathlib.Path(folder)
    index = folder / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    for shard in sorted(shards):
        for stored, tensor in _read(folder / shard):
            if (name := keep(stored)) is not None:
                yield name, np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])


def _read(file: pathlib.Path) -> list[tuple[str, dict[str, Any]]]:
    """Not by `safe_open`, whose memory map ends the process where the file becomes shorter while it is read."""
    try:
        return deserialize(file.read_bytes())
    except (SafetensorError, OSError) as error:
        raise KdjaxError(f"{file} cannot be read ({error}): download it again") from None


def _nest(tensors: Iterator[tuple[str, np.ndarray]]) -> Params:
    params: Params = {}
    for name, array in tensors:
        *path, leaf = name.split(".")
        node = params
        for part in path:
            node = node.setdefault(int(part) if part.isdigit() else part, {})
        node[leaf] = array
    return params


def _widen(params: Params) -> Params:
    return {k: _widen(v) if isinstance(v, dict) else v.astype(np.float64) for k, v in params.items()}
