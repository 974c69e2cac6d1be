"""The INT4 kernels compiled for this GPU: fresh random inputs, outputs that start as NaN, K2.6's widths."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import device_kind
from pallas_kernels.int4_experts import int4_experts, int4_matmul
from pallas_kernels.int4_experts.config import choose, device_table
from pallas_kernels.int4_experts.layout import TiledMatrix
from pallas_kernels.int4_experts.workload import dense_expert, random_experts, routing
from tests.pallas_kernels.backends import needs_gpu

pytestmark = needs_gpu

LARGEST_ERROR = 5e-3  # relative norm over all tokens
EXPERTS, HIDDEN, TOP_K = 48, 7168, 8


def poison() -> None:
    """Fill memory that the next outputs are likely to get with NaN, and free it."""
    jax.block_until_ready([jnp.full((2**22,), jnp.nan, jnp.float32) for _ in range(64)])


@jax.jit
def expected_of(experts, x, indices, weights):
    """Expert by expert in float32, so that one expert at a time is unpacked."""
    product = functools.partial(jnp.matmul, precision="highest")
    x = x.astype(jnp.float32)

    def one(e, y):
        gate, up, down = (dense_expert(experts, part, e) for part in ("gate", "up", "down"))
        weight = jnp.sum(jnp.where(indices == e, weights, 0.0), axis=1)
        return y + weight[:, None] * product(jax.nn.silu(product(x, gate.T)) * product(x, up.T), down.T)

    return jax.lax.fori_loop(0, experts.experts, one, jnp.zeros_like(x))


@functools.cache
def experts_of(inner, seed):
    return random_experts(jax.random.key(seed), EXPERTS, HIDDEN, inner)


SEED = int.from_bytes(os.urandom(3), "little")


@pytest.mark.parametrize("pattern", ["uniform", "skewed", "same", "elsewhere"])
@pytest.mark.parametrize(
    ("kernel", "tokens"),
    [("triton", n) for n in (1, 2, 4, 9, 17, 33, 64, 130, 330, 1024, 4096)]
    + [("mosaic", n) for n in (1, 33, 330, 1024, 4096)],
)
@pytest.mark.parametrize("inner", [256, 2048])
def test_matches_float32(inner, kernel, tokens, pattern):
    print(f"seed={SEED}")
    table = device_table(device_kind())
    if kernel == "mosaic" and not any(entry.get("kernel") == kernel for entry in table["experts"][str(inner)]):
        pytest.skip("the Mosaic kernel is for Hopper")
    config = choose(table, tokens, inner, (kernel,))
    rng = np.random.default_rng([SEED, tokens])
    indices = routing(rng, tokens, EXPERTS, TOP_K, "skewed" if pattern == "skewed" else "uniform")
    if pattern == "same":
        indices[:] = indices[0]
    if pattern == "elsewhere":
        indices = 2 * indices - EXPERTS // 2
    x = jnp.asarray(rng.standard_normal((tokens, HIDDEN)), jnp.bfloat16)
    weights = jnp.asarray(rng.uniform(0.1, 1, (tokens, TOP_K)), jnp.float32)
    experts = experts_of(inner, SEED)
    run = jax.jit(functools.partial(int4_experts, backend=kernel, config=config))
    poison()
    y = np.asarray(run(x, jnp.asarray(indices), weights, experts), np.float32)
    expected = np.asarray(expected_of(experts, x, jnp.asarray(indices), weights))
    assert np.isfinite(y).all()
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    assert error < LARGEST_ERROR, (error, config)


@pytest.mark.parametrize("tokens", [5, 600])
@pytest.mark.parametrize("kernel", ["triton", "mosaic"])
def test_small_experts_whose_widths_are_padded(kernel, tokens):
    """Tuned rings shrink to them. On Hopper "triton" chooses Mosaic itself for many tokens."""
    table = device_table(device_kind())
    if kernel == "mosaic" and not any(entry.get("kernel") == kernel for entry in table["experts"]["256"]):
        pytest.skip("the Mosaic kernel is for Hopper")
    rng = np.random.default_rng([SEED, tokens])
    experts = random_experts(jax.random.key(SEED), 8, 320, 96)
    x = jnp.asarray(rng.standard_normal((tokens, 320)), jnp.bfloat16)
    indices = jnp.asarray(routing(rng, tokens, 8, 2, "skewed"))
    weights = jnp.asarray(rng.uniform(0.1, 1, (tokens, 2)), jnp.float32)
    poison()
    y = np.asarray(jax.jit(functools.partial(int4_experts, backend=kernel))(x, indices, weights, experts), np.float32)
    expected = np.asarray(expected_of(experts, jnp.pad(x, ((0, 0), (0, 64))), indices, weights))[:, :320]
    assert np.linalg.norm(y - expected) < LARGEST_ERROR * np.linalg.norm(expected)


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_matmul(tokens):
    experts = experts_of(2048, SEED)
    matrix = TiledMatrix(experts.down_words[:1], experts.down_scales[:1], HIDDEN, 2048)
    x = jnp.asarray(np.random.default_rng(SEED).standard_normal((tokens, 2048)), jnp.bfloat16)
    poison()
    y = np.asarray(jax.jit(functools.partial(int4_matmul, backend="triton"))(x, matrix), np.float32)
    w = dense_expert(experts, "down", jnp.int32(0))
    expected = np.asarray(jnp.matmul(x.astype(jnp.float32), w.T, precision="highest"))
    assert np.linalg.norm(y - expected) < LARGEST_ERROR * np.linalg.norm(expected)
