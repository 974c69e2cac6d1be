"""Last stage: the trained weights in the Hugging Face layout of K2.6 and of its drafter."""

from __future__ import annotations

import json
import pathlib
import shutil
from importlib import resources
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.nano.config import NanoConfig
from experiments.nano.state import load_dict
from kdjax.checkpoint import save_drafter, save_target
from kdjax.checkpoint.int4 import pack
from kdjax.model.int4 import Int4


def checkpoint_params(config: NanoConfig, frozen: dict[Any, Any]) -> dict[Any, Any]:
    """Frozen weights of the trainer as the params of `kdjax.model`: experts packed with the very codes of training."""
    assert config.target.experts_int4 is not None
    layers = {}
    for i, layer in frozen["layers"].items():
        layers[i] = dict(layer)
        if config.target.is_moe(i):
            experts = {
                name: {
                    "weight": Int4(
                        packed=jnp.asarray(pack(e["codes"]).view(np.uint32)),
                        scale=jnp.asarray(e["scale"]),
                        columns=e["codes"].shape[-1],
                        group_size=config.target.experts_int4.group_size,
                    )
                }
                for name, e in layer["mlp"]["experts"].items()
            }
            layers[i]["mlp"] = {**layer["mlp"], "experts": experts}
    return {**frozen, "layers": layers}


def run(config: NanoConfig, folder: pathlib.Path) -> None:
    """Reads `target.safetensors` and `drafter.safetensors` of `folder`; writes `folder/export/{target,drafter}`."""
    out = folder / "export"
    save_target(out / "target", config.target, checkpoint_params(config, load_dict(folder / "target.safetensors")))
    save_drafter(out / "drafter", config.drafter, load_dict(folder / "drafter.safetensors"))
    shutil.copyfile(config.data.tokenizer, out / "target" / "tiktoken.model")
    template = resources.files("kdjax.tokenizer") / "chat_template.jinja"
    (out / "target" / "chat_template.jinja").write_text(template.read_text(encoding="utf-8"))
    # Every training document follows an [EOS], so that is where a prompt starts.
    settings = {"add_bos_token": True, "bos_token": "[EOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    (out / "target" / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
