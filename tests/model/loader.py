"""Oracle checkpoints as params, read tensor by tensor with safetensors: independent of kdjax.checkpoint."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
from safetensors.numpy import load_file

from kdjax.config import Int4Config, ModelConfig, YarnConfig
from kdjax.model import k2
from kdjax.model.experts import OutputMajor, place_experts
from kdjax.model.int4 import Int4
from kdjax.model.runtime import Runtime

PREFIX = "language_model."
SAME_NAME = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok "
    "n_shared_experts first_k_dense_replace routed_scaling_factor norm_topk_prob rms_norm_eps rope_theta "
    "max_position_embeddings bos_token_id pad_token_id"
).split()


def read_config(folder: pathlib.Path) -> ModelConfig:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    yarn = {k: v for k, v in text["rope_scaling"].items() if k != "type"}
    return ModelConfig(
        **{k: text[k] for k in SAME_NAME}, rope_scaling=YarnConfig(**yarn), experts_int4=Int4Config(group_size=32)
    )


def read_params(folder: pathlib.Path, config: ModelConfig, runtime: Runtime) -> k2.Params:
    files: dict[str, np.ndarray] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        files |= load_file(shard)

    def tensor(path: tuple, leaf: jax.ShapeDtypeStruct | Int4 | OutputMajor):
        names = [str(k.key) for k in path]
        names = (["lm_head"] + names[1:]) if names[0] == "lm_head" else ["model", *names]
        name = PREFIX + ".".join(names)
        if ".mlp.experts." not in name:
            return jnp.asarray(files[name]).astype(leaf.dtype)
        packed, scale = (
            np.stack(
                [files[name.replace(".experts.", f".experts.{e}.") + suffix] for e in range(config.n_routed_experts)]
            )
            for suffix in ("_packed", "_scale")
        )
        columns = int(files[name.replace(".experts.", ".experts.0.") + "_shape"][1])
        int4 = Int4(jnp.asarray(packed.view(np.uint32)), jnp.asarray(scale), columns, 32)
        return place_experts(int4, names[-2], runtime)

    return jax.tree_util.tree_map_with_path(
        tensor, k2.abstract_params(config, runtime), is_leaf=lambda x: isinstance(x, Int4 | OutputMajor)
    )
