"""Bytes that one device reads in one round of speculative decoding, and the time that reading them takes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from kdjax.config import MeshConfig, ModelConfig, ModelPair
from kdjax.config.mesh import DeviceConfig
from kdjax.plan.memory import RUNTIME, Memory, Workload

TRIALS = 1000
DRAFT_READS = ("drafter", "lm_head_again", "drafter_cache")
"""The components of `Step.reads` that are read for the draft."""


class Step(NamedTuple):
    """One round on the busiest device.

    Attributes:
        distinct_experts: expected number per layer that the tokens of a verify forward choose, over all devices.
        experts_read: expected number of them on the device that has most; all of them where the expert axis is 1.
        reads: bytes by component: weights of the verify forward, its cache rows, and those of the draft forward.
        all_reduces: exchanges of a round: (how many, message bytes) of verify and draft forward.
    """

    distinct_experts: float
    experts_read: float
    reads: dict[str, int]
    all_reduces: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        """All that are read."""
        return sum(self.reads.values())

    @property
    def verify_bytes(self) -> int:
        """Those of the verify forward alone."""
        return sum(size for name, size in self.reads.items() if name not in DRAFT_READS)

    def floor_ms(self, device: DeviceConfig) -> float:
        """What reading every needed byte once takes at the rate that was measured on the device."""
        return self.bytes / device.read_gb_per_s * 1e-6

    def all_reduce_ms(self, device: DeviceConfig) -> float | None:
        """None where the device's all-reduce was not measured."""
        times = [device.all_reduce_ms(message) for _, message in self.all_reduces]
        if any(time is None for time in times):
            return None
        return sum(count * time for (count, _), time in zip(self.all_reduces, times, strict=True) if time is not None)


def distinct_experts(config: ModelConfig, tokens: int) -> float:
    """Expected number that `tokens` tokens choose, each its top_k uniformly and independently.

    Neighbouring tokens choose alike in truth, so this is an upper estimate.
    """
    n, k = config.n_routed_experts, config.num_experts_per_tok
    return n * (1 - (1 - k / n) ** tokens)


@functools.lru_cache(maxsize=64)
def busiest(config: ModelConfig, tokens: int, parts: int) -> float:
    """Expected number of distinct experts on the busiest of `parts` devices that share them; from random draws."""
    rng = np.random.default_rng(0)
    n, k = config.n_routed_experts, config.num_experts_per_tok
    most = []
    for _ in range(TRIALS):
        chosen = np.argpartition(rng.random((tokens, n), np.float32), k - 1, axis=1)[:, :k]
        most.append(np.bincount(np.unique(chosen) // (n // parts)).max())
    return float(np.mean(most))


def step(
    pair: ModelPair, mesh: MeshConfig, workload: Workload, held: Memory, experts_read: float | None = None
) -> Step:
    """What a round reads of what the devices hold (`held`); `experts_read` where it is known, not expected.

    Every weight once but for the rows of embed_tokens, and of the routed experts those chosen; all committed cache
    rows once per forward; for the draft, its weights, lm_head again and its visible context.
    """
    target, drafter = pair.target, pair.drafter
    tokens, drafting = workload.tokens, drafter is not None and workload.budget > 0
    distinct = distinct_experts(target, tokens)
    read = experts_read
    if read is None:
        read = busiest(target, tokens, mesh.expert) if mesh.expert > 1 else distinct
    here = target.n_routed_experts // mesh.expert
    reads = {name: held.target[name] for name in held.target if name not in ("embed_tokens", "routed_experts")}
    reads["routed_experts"] = round(held.target.get("routed_experts", 0) * read / here)
    size = RUNTIME.dtype.itemsize
    row = target.latent_dim * size * target.num_hidden_layers
    reads["kv_cache"] = workload.streams * workload.context * row // mesh.size(mesh.cache_axes)

    moe = sum(target.is_moe(layer) for layer in range(target.num_hidden_layers))
    # Two per layer and the embedding; experts are summed over every axis, the rest where it is split.
    sums = (1 + 2 * target.num_hidden_layers - moe if mesh.model_axes else 0) + (moe if mesh.all_axes else 0)
    exchanges = [(sums, tokens * target.hidden_size * size)]
    if drafting:
        assert drafter is not None
        reads["drafter"] = sum(held.drafter.values())
        reads["lm_head_again"] = held.target["lm_head"]
        layers, all_rows = range(drafter.num_hidden_layers), workload.context
        seen = sum(min(all_rows, drafter.window(layer) or all_rows) for layer in layers)
        width = 2 * drafter.num_key_value_heads * drafter.head_dim * size
        reads["drafter_cache"] = workload.streams * seen * width // mesh.size(mesh.drafter_axes)
        block = workload.streams * drafter.block_size * drafter.hidden_size * size
        exchanges.append((2 * drafter.num_hidden_layers + 1 if mesh.drafter_axes else 0, block))
    return Step(distinct, read, reads, tuple(exchanges))
