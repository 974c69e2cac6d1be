"""What decoding on a mesh takes and gives: memory per device, bytes and time per step, tokens per second."""

from __future__ import annotations

import dataclasses
from typing import Any

from kdjax.config import Cluster, DeviceConfig, MeshConfig, ModelPair
from kdjax.errors import KdjaxError
from kdjax.plan.compiled import Compiled
from kdjax.plan.memory import Memory, Workload, memory
from kdjax.plan.step import Step, step
from kdjax.tree import check_budget


@dataclasses.dataclass(frozen=True)
class Rate:
    """Tokens per second of all streams at `acceptance` tokens per round and stream, bonus included.

    `floor` is the most that reading memory allows; `with_all_reduce` adds the measured time of the exchanges.
    """

    acceptance: float
    floor: float
    with_all_reduce: float | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """`plain` is the step of autoregressive decoding with the same streams; `compiled` is there if asked for."""

    mesh: MeshConfig
    device: DeviceConfig
    workload: Workload
    memory: Memory
    step: Step
    plain: Step
    compiled: Compiled | None = None

    @property
    def device_bytes(self) -> int:
        """Memory of one device."""
        return round(self.device.memory_gb * 1e9)

    @property
    def headroom(self) -> int:
        """Bytes left: of the compiler's account where there is one, else of the estimate."""
        return self.device_bytes - (self.compiled or self.memory).total

    @property
    def fits(self) -> bool:
        """Whether there is headroom."""
        return self.headroom >= 0

    @property
    def floor_ms(self) -> float:
        """Time of a round in which every needed byte is read once, at the device's measured rate."""
        return self.step.floor_ms(self.device)

    @property
    def break_even(self) -> float:
        """Tokens per round from which on speculation beats autoregressive decoding, if both reach their floors."""
        return self.floor_ms / self.plain.floor_ms(self.device)

    def rate(self, acceptance: float) -> Rate:
        """Tokens per second where a round commits `acceptance` tokens per stream."""
        tokens = 1e3 * self.workload.streams * acceptance
        exchanges = self.step.all_reduce_ms(self.device)
        total = None if exchanges is None else tokens / (self.floor_ms + exchanges)
        return Rate(acceptance, tokens / self.floor_ms, total)

    def as_json(self, acceptance: tuple[float, ...]) -> dict[str, Any]:
        """Bytes, milliseconds, tokens per second; per device unless said otherwise."""
        held, step = self.memory, self.step
        return {
            "workload": self.workload._asdict(),
            "bytes_per_device": {
                "target_weights": sum(held.target.values()),
                "drafter_weights": sum(held.drafter.values()),
                "kv_cache": held.kv_cache,
                "drafter_cache": held.drafter_cache,
                "workspace": held.workspace,
                "total": held.total,
            },
            "target_weights": held.target,
            "drafter_weights": held.drafter,
            "device_memory": self.device_bytes,
            "headroom": self.headroom,
            "fits": self.fits,
            "tokens_per_step": self.workload.tokens,
            "distinct_experts_per_layer": step.distinct_experts,
            "experts_read_per_layer": step.experts_read,
            "bytes_read_per_step": {**step.reads, "total": step.bytes},
            "floor_ms_per_step": self.floor_ms,
            "all_reduce_ms_per_step": step.all_reduce_ms(self.device),
            "autoregressive_floor_ms_per_step": self.plain.floor_ms(self.device),
            "break_even_acceptance": self.break_even if self.workload.budget else None,
            "tokens_per_s": [dataclasses.asdict(self.rate(value)) for value in acceptance],
            "compiled": self.compiled and {**dataclasses.asdict(self.compiled), "total": self.compiled.total},
        }


def plan(pair: ModelPair, cluster: Cluster, workload: Workload) -> Plan:
    """Plan `workload` for a model pair on the devices of a mesh file.

    Raises:
        KdjaxError: the mesh has no device facts or cannot cut the model evenly, the context is longer than the model's,
            or a tree is asked for without a drafter or with more nodes than a decoder accepts.
    """
    if cluster.device is None:
        raise KdjaxError("the mesh file has no [device]: add kind, memory_gb and read_gb_per_s")
    if workload.context > (limit := pair.target.max_position_embeddings):
        raise KdjaxError(f"context {workload.context} exceeds the model's max_position_embeddings={limit}: lower it")
    if workload.budget and pair.drafter is None:
        raise KdjaxError(f"budget {workload.budget} needs a drafter: give one, or budget 0 for autoregressive decoding")
    if workload.budget and pair.drafter is not None:
        check_budget(pair.drafter.block_size - 1, workload.budget, pair.target.vocab_size)
    held = memory(pair, cluster.mesh, workload)
    plain = step(pair, cluster.mesh, workload._replace(budget=0), held)
    return Plan(cluster.mesh, cluster.device, workload, held, step(pair, cluster.mesh, workload, held), plain)
