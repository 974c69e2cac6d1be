"""Kernels compiled for a GPU that is not there: whether they fit, before anything runs.

Lowering (`lower_for`) runs on any JAX and catches what Triton's front end rejects. A full compile (`compile_for`) needs
`jax[cuda13]` and catches too much shared memory as well; without a driver it also needs the environment variable
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

_ALIKE = (
    "threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 fpus_per_core: 128 "
    "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
    "registers_per_core_limit: 65536 registers_per_block_limit: 65536"
)
TARGETS = {
    "NVIDIA H200": (
        "shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 "
        "core_count: 132 memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 "
        "device_memory_size: 150000000000 cuda_compute_capability { major: 9 minor: 0 }"
    ),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (
        "shared_memory_per_core: 102400 shared_memory_per_block_optin: 101376 threads_per_core_limit: 1536 "
        "core_count: 188 memory_bandwidth: 1792000000000 l2_cache_size: 134217728 clock_rate_ghz: 2.6 "
        "device_memory_size: 101000000000 cuda_compute_capability { major: 12 minor: 0 }"
    ),
}
"""Facts of each device kind that XLA and Triton compile by."""


def available() -> bool:
    """Whether `compile_for` can work here: the CUDA plugin is installed."""
    names = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    return any(n and n.startswith("jax-cuda") and n.endswith("-plugin") for n in names)


@contextlib.contextmanager
def pretend(kind: str) -> Iterator[None]:
    """Trace for a device of this kind: kernels choose the tiles tuned for it."""
    cores = int(TARGETS[kind].split("core_count: ")[1].split()[0])
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def lower_for(kind: str, f: Callable[..., Any], *args: Any) -> str:
    """StableHLO of `jax.jit(f)(*args)` with its kernels lowered for CUDA; arrays or shape structs as arguments."""
    with pretend(kind):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@functools.cache
def devices(kind: str, count: int) -> list[Any]:
    """Compile-only devices of this kind, all in one host."""
    config = f'platform_name: "CUDA" device_description_str: "{kind}" gpu_device_info {{ {_ALIKE} {TARGETS[kind]} }}'
    return topologies.get_topology_desc("", "cuda", target_config=config, topology=f"1x1x{count}").devices


def compile_for(kind: str, f: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
    """`f` compiled to machine code for one device of `kind`. Raises what XLA raises where a kernel does not fit."""
    sharding = SingleDeviceSharding(devices(kind, 1)[0])
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    with pretend(kind):
        lowered = jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",))
    return lowered.compile()
