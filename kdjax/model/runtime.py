"""How a model is run: the choices that are not in the checkpoint."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import msgspec
from jax import lax

import pallas_kernels.numerics
from kdjax.config import ONE_DEVICE, MeshConfig
from kdjax.config.generate import RuntimeSection
from kdjax.errors import KdjaxError

Dtype = Literal["float32", "bfloat16"]
Backend = Literal["xla", "triton", "interpret"]
ExpertWeights = Literal["packed", "dequantized"]
Mla = Literal["absorbed", "materialised"]
Layout = Literal["checkpoint", "fused"]


class Runtime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numerics and kernels of one run, chosen once. Hashable, so it can be a static argument of `jax.jit`.

    Attributes:
        compute_dtype: dtype of activations and of unquantised weights. float32 is the exactness mode: bf16 weights are
            widened once, at load, and matmuls run in full float32.
        cache_dtype: dtype of KV cache rows.
        backend: implementation of the ops of `pallas_kernels`: "xla" anywhere, "triton" on NVIDIA GPUs, "interpret" the
            kernels of "triton" emulated, for tests.
        expert_weights: "packed" keeps INT4 experts packed up to the kernel; "dequantized" expands them to
            `compute_dtype` once, at load (8 times the memory in float32).
        layout: "checkpoint" keeps every matrix as it is stored. "fused" prepares them once, at load, for small models
            on CPU, where each matmul has a fixed cost: see `kdjax.model.fused`. float32 and dequantized experts only,
            on one device.
        mesh: how the model is split over devices. On more than one, model functions run inside `jax.shard_map`, where
            every array is this device's part; see `kdjax.sharding`.
        mla: "absorbed" attends in the latent space; "materialised" expands keys and values of every head, as a check.

    Raises:
        KdjaxError: a value that is not one of a field's, or fields that do not go together.
    """

    compute_dtype: Dtype
    cache_dtype: Dtype
    backend: Backend = "xla"
    expert_weights: ExpertWeights = "packed"
    layout: Layout = "checkpoint"
    mesh: MeshConfig = ONE_DEVICE
    mla: Mla = "absorbed"

    def __post_init__(self) -> None:
        for name, choices in (
            ("compute_dtype", Dtype),
            ("cache_dtype", Dtype),
            ("backend", Backend),
            ("expert_weights", ExpertWeights),
            ("layout", Layout),
            ("mla", Mla),
        ):
            if (value := getattr(self, name)) not in get_args(choices):
                raise KdjaxError(
                    f"Runtime {name}={value!r} is not supported: use one of {', '.join(get_args(choices))}"
                )

        if self.mla == "materialised" and self.mesh.cache_axes:
            raise KdjaxError("Runtime mla='materialised' reads the whole cache: use 'absorbed' or a mesh of sequence=1")
        if self.layout == "fused":
            for name, needed in (
                ("compute_dtype", "float32"),
                ("expert_weights", "dequantized"),
                ("mla", "absorbed"),
            ):
                if (value := getattr(self, name)) != needed:
                    raise KdjaxError(f"Runtime layout='fused' needs {name}={needed!r}, not {value!r}: change either")
            if self.mesh.devices > 1:
                raise KdjaxError(
                    f"Runtime layout='fused' is for one device, not a mesh of {self.mesh.devices}: use 'checkpoint'"
                )

    @property
    def dtype(self) -> jnp.dtype:
        """`compute_dtype` as JAX has it."""
        return jnp.dtype(self.compute_dtype)

    @property
    def precision(self) -> lax.Precision:
        """Of matmuls: the highest in float32."""
        return pallas_kernels.numerics.precision(self.dtype)


CPU_EXACT = Runtime(compute_dtype="float32", cache_dtype="float32", expert_weights="dequantized", layout="fused")
"""The exactness mode on CPU: float32 throughout, experts expanded and matrices fused at load."""

GPU = Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16", backend="triton")
"""What NVIDIA GPUs are fast with: bfloat16, INT4 experts packed, the Triton kernels."""


def require_device(backend: Backend | None) -> str:
    """Where JAX runs. Raises KdjaxError where kernels of that backend do not."""
    platform = jax.default_backend()
    if backend == "triton" and platform != "gpu":
        raise KdjaxError(
            f"runtime.backend = 'triton' needs an NVIDIA GPU and JAX runs on {platform}: use 'xla', as "
            "kdjax.CPU_EXACT does"
        )
    return platform


def settled(section: RuntimeSection, mesh: MeshConfig = ONE_DEVICE) -> RuntimeSection:
    """`section` with all that it leaves open: as in `GPU` where JAX runs on one, unless float32 is asked for; as in
    `CPU_EXACT` elsewhere.

    Raises:
        KdjaxError: the Triton kernels are asked for and there is no GPU.
    """
    platform = require_device(section.backend)
    preset = GPU if platform == "gpu" and section.compute_dtype != "float32" else CPU_EXACT
    fields = {name: getattr(section, name) for name in ("compute_dtype", "cache_dtype", "backend", "expert_weights")}
    fields = {name: value or getattr(preset, name) for name, value in fields.items()}
    fusable = mesh.devices == 1 and (fields["compute_dtype"], fields["expert_weights"]) == ("float32", "dequantized")
    layout = section.layout or ("fused" if fusable else "checkpoint")
    return msgspec.structs.replace(section, **fields, layout=layout)


def runtime_of(section: RuntimeSection, mesh: MeshConfig = ONE_DEVICE) -> Runtime:
    """Raises KdjaxError like `settled` and `Runtime`."""
    chosen = settled(section, mesh)
    names = ("compute_dtype", "cache_dtype", "backend", "expert_weights", "layout")
    fields: dict[str, Any] = {name: getattr(chosen, name) for name in names}
    return Runtime(**fields, mesh=mesh)
