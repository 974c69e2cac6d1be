"""The whole model with the kernels in interpret mode against the plain-JAX backend, and which backend is chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from kdjax.config import Int4Config, MeshConfig
from kdjax.config.generate import RuntimeSection
from kdjax.errors import KdjaxError
from kdjax.model import k2
from kdjax.model.cache import KVCache
from kdjax.model.mla import PREFILL_TOKENS
from kdjax.model.runtime import CPU_EXACT, GPU, Runtime, runtime_of
from tests.model.small import CONFIG, FLOAT32, forward, prefill, random_params
from tests.tolerances import MODEL_RELATIVE_BFLOAT16, SAME_MODEL_FLOAT32

DENSE = msgspec.structs.replace(CONFIG, first_k_dense_replace=CONFIG.num_hidden_layers)


def test_interpret_backend_verifies_a_tree_like_xla():
    """Two ragged streams: one with a tree of five tokens, one with three of them and two of padding."""
    parents = [-1, 0, 0, 1, 1]
    mask = np.eye(5, dtype=bool)
    for i, parent in enumerate(parents[1:], start=1):
        mask[i] |= mask[parent]
    depths = mask.sum(-1) - 1
    hidden = []
    for backend in ("xla", "interpret"):
        runtime = msgspec.structs.replace(FLOAT32, backend=backend)
        params = random_params(DENSE, runtime)
        cache, _ = prefill(params, [range(1, 12), range(20, 24)], config=DENSE, runtime=runtime)
        out = forward(
            params,
            jnp.asarray([[3, 9, 8, 7, 7], [1, 2, 3, 0, 0]], jnp.int32),
            cache.lengths[:, None] + jnp.asarray(depths, jnp.int32)[None, :],
            cache,
            jnp.asarray(np.stack([mask, mask])),
            jnp.asarray([5, 3], jnp.int32),
            config=DENSE,
            runtime=runtime,
        )
        hidden.append(np.asarray(out.hidden))
    SAME_MODEL_FLOAT32.check(hidden[1][0], hidden[0][0])
    SAME_MODEL_FLOAT32.check(hidden[1][1, :3], hidden[0][1, :3])


def test_interpret_backend_reads_a_long_prompt_like_xla():
    """A chunk long enough for the prefill kernel, on a prefix of 40 tokens."""
    n, start = PREFILL_TOKENS, 40
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, DENSE.vocab_size, (1, n)), jnp.int32)
    hidden = []
    for backend in ("xla", "interpret"):
        runtime = msgspec.structs.replace(FLOAT32, backend=backend)
        cache = KVCache.empty(DENSE, 1, start + n, 0, runtime.cache_dtype)
        prefix = jnp.asarray(np.random.default_rng(1).standard_normal(cache.latent[0].shape), jnp.float32)
        cache = KVCache(tuple(prefix for _ in cache.latent), jnp.asarray([start], jnp.int32))
        positions = start + jnp.arange(n, dtype=jnp.int32)[None, :]
        params = random_params(DENSE, runtime)
        hidden.append(np.asarray(forward(params, tokens, positions, cache, config=DENSE, runtime=runtime).hidden))
    SAME_MODEL_FLOAT32.check(hidden[1], hidden[0])


def random_int4_params(config, runtime):
    """As `random_params`, from random packed words, in the layout that `runtime` runs."""
    stored = msgspec.structs.replace(runtime, backend="xla")
    rng = np.random.default_rng(0)

    def leaf(s):
        if s.dtype == jnp.uint32:
            return jnp.asarray(rng.integers(0, 2**32, s.shape, np.uint32))
        values = (
            rng.standard_normal(s.shape) * s.shape[-1] ** -0.5 if len(s.shape) > 1 else rng.uniform(0.5, 1.5, s.shape)
        )
        return jnp.asarray(values, s.dtype) * (0.1 if s.dtype == jnp.bfloat16 and len(s.shape) == 3 else 1)

    return k2.arrange(jax.tree.map(leaf, k2.abstract_params(config, stored)), config, runtime)


def test_interpret_backend_runs_int4_experts_as_well_as_xla():
    """Both against float32, wherever bfloat16 lets a token choose the same experts, which is nearly everywhere."""
    config = msgspec.structs.replace(
        CONFIG, moe_intermediate_size=32, experts_int4=Int4Config(group_size=32), first_k_dense_replace=0
    )
    slots, q = 16, 4
    tokens = jnp.arange(1, 1 + slots * q, dtype=jnp.int32).reshape(slots, q)
    positions = jnp.broadcast_to(jnp.arange(q, dtype=jnp.int32), tokens.shape)

    def run(runtime):
        params = random_int4_params(config, runtime)
        assert ("tiles" in params["layers"][0]["mlp"]["experts"]) == (runtime.backend == "interpret")
        cache = KVCache.empty(config, slots, 8, 8, runtime.cache_dtype)
        out = forward(params, tokens, positions, cache, config=config, runtime=runtime)
        return np.asarray(out.hidden, np.float32), np.sort(np.asarray(out.routing), axis=-1)

    exact, chosen = run(FLOAT32)
    for backend in ("xla", "interpret"):
        hidden, routing = run(msgspec.structs.replace(GPU, backend=backend))
        alike = np.all(routing == chosen, axis=(0, 3))
        assert np.mean(alike) >= 0.9
        alike = np.logical_and.accumulate(alike, axis=1)  # later tokens see one that chose others
        assert np.linalg.norm((hidden - exact)[alike]) / np.linalg.norm(exact[alike]) < MODEL_RELATIVE_BFLOAT16


@pytest.mark.parametrize(
    ("platform", "section", "mesh", "chosen"),
    [
        ("cpu", RuntimeSection(), MeshConfig(), CPU_EXACT),
        ("gpu", RuntimeSection(), MeshConfig(), GPU),
        ("gpu", RuntimeSection(compute_dtype="float32"), MeshConfig(), CPU_EXACT),
        ("gpu", RuntimeSection(backend="xla"), MeshConfig(), msgspec.structs.replace(GPU, backend="xla")),
        ("gpu", RuntimeSection(), MeshConfig(tensor=2), msgspec.structs.replace(GPU, mesh=MeshConfig(tensor=2))),
        (
            "cpu",
            RuntimeSection(compute_dtype="bfloat16"),
            MeshConfig(),
            Runtime(compute_dtype="bfloat16", cache_dtype="float32", expert_weights="dequantized"),
        ),
    ],
)
def test_what_is_left_open_follows_the_platform(monkeypatch, platform, section, mesh, chosen):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert runtime_of(section, mesh) == chosen


def test_kernels_where_they_cannot_run_are_one_line_errors():
    with pytest.raises(KdjaxError, match="backend = 'triton' needs an NVIDIA GPU and JAX runs on cpu: use 'xla'"):
        runtime_of(RuntimeSection(backend="triton"))
    int4 = msgspec.structs.replace(CONFIG, experts_int4=Int4Config(group_size=32))
    with pytest.raises(KdjaxError, match="INT4 experts by bfloat16, not compute_dtype='float32': choose bfloat16"):
        k2.abstract_params(int4, msgspec.structs.replace(FLOAT32, backend="triton"))
