"""Logits of the golden checkpoints on every mesh of up to eight devices that they allow."""

import functools

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kdjax.checkpoint import load_target
from kdjax.config import MeshConfig
from kdjax.model import k2
from kdjax.model.cache import KVCache
from kdjax.model.runtime import Runtime
from kdjax.sharding import kv_cache_rules, make_mesh, partition, shardings, target_specs
from tests.oracles import HF_K2, prompts
from tests.sharding import own_case
from tests.sharding.splits import possible, some
from tests.tolerances import TARGET_LOGITS

PACKED = Runtime(compute_dtype="float32", cache_dtype="float32", expert_weights="packed")
WIDTH = 32  # both short prompts as two slots of one forward


@functools.cache
def model(path):
    return load_target(path, PACKED)


GOLDEN = {case: [mesh for of, mesh in possible(HF_K2) if of == case] for case in HF_K2}
QUICK = {
    "hf_k2_a": [MeshConfig(tensor=2, expert=2), MeshConfig(expert=8, outside_experts="replicated")],
    "hf_k2_b": [MeshConfig(expert=3, outside_experts="replicated")],
}


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        pytest.param(case, *param.values, marks=param.marks, id=f"{case}-{param.id}")
        for case in HF_K2
        for param in some(GOLDEN[case], QUICK[case])
    ],
)
def test_logits_on_every_mesh(oracle, case, mesh):
    o = oracle(case)
    target = model(o.checkpoint)
    logits, compiled = run(target, mesh, [p.input_ids for p in prompts(o)[:2]])
    for slot, prompt in enumerate(prompts(o)[:2]):
        TARGET_LOGITS.check(logits[slot, prompt.rows], prompt.expected["logits"], prompt.name)
    # Two all-reduces per layer and one for the embedding, but for what each device holds whole; nothing is gathered.
    moe, layers = target.config.num_hidden_layers - target.config.first_k_dense_replace, target.config.num_hidden_layers
    assert compiled.count(" all-reduce(") == (2 * layers + 1 if mesh.model_axes else moe)
    assert " all-gather(" not in compiled and " collective-permute(" not in compiled


@pytest.mark.parametrize("mesh", some(own_case.MESHES, [MeshConfig(tensor=4, expert=2)]))
def test_own_case_on_every_mesh(own, mesh):
    logits, _ = run(model(own.folder), mesh, [np.array(prompt) for prompt in own_case.PROMPTS])
    for slot, expected in enumerate(own.logits):
        TARGET_LOGITS.check(logits[slot, : len(expected)], expected, f"prompt {slot}")


def run(target, mesh: MeshConfig, ids):
    config, runtime = target.config, msgspec.structs.replace(PACKED, mesh=mesh)
    tokens = np.stack([np.pad(i, (0, WIDTH - len(i))) for i in ids]).astype(np.int32)
    cache = KVCache.empty(config, len(ids), 64, WIDTH, "float32")
    devices = make_mesh(mesh)
    specs = (target_specs(target.params, config, mesh), P(), partition(cache, kv_cache_rules(mesh), mesh))

    def forward(params, tokens, cache):
        positions = jnp.broadcast_to(jnp.arange(WIDTH, dtype=jnp.int32), tokens.shape)
        out = k2.forward(params, config, tokens, positions, cache, runtime=runtime)
        return k2.logits(params, config, out.hidden, runtime)

    vocabulary = P(None, None, mesh.model_axes or None)
    spread = jax.shard_map(forward, mesh=devices, in_specs=specs, out_specs=vocabulary, check_vma=False)
    args = jax.device_put((target.params, tokens, cache), shardings(specs, devices))
    compiled = jax.jit(spread).lower(*args).compile()
    return np.asarray(compiled(*args)), compiled.as_text()
