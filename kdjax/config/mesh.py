"""How a model is spread over devices, and what such a device can do (`configs/meshes/*.toml`)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kdjax.config.decode import AtLeast1
from kdjax.errors import KdjaxError

AXES = ("expert", "sequence", "tensor")
"""Axis names of the mesh, slowest first: neighbouring devices share a tensor group."""

Axes = tuple[str, ...]
Placement = Literal["sharded", "replicated"]
Positive = Annotated[float, Meta(gt=0)]


class MeshConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`expert * sequence * tensor` devices. Hashable.

    Attributes:
        tensor: splits heads, vocabulary, widths of dense MLPs and the intermediate width of experts.
        expert: splits the routed experts themselves.
        sequence: splits what `tensor` splits, and the rows of the KV cache too: each group of `sequence` devices holds
            one copy of the cache between them, for contexts that do not fit on every device.
        outside_experts: whether the expert axis splits heads, vocabulary and dense widths like `tensor`, or repeats
            them. Repeating costs memory; it serves models with fewer heads than devices.
        drafter: whether the drafter's heads and widths are split like those of the target, or repeated everywhere.

    Raises:
        KdjaxError: an axis below 1.
    """

    tensor: AtLeast1 = 1
    expert: AtLeast1 = 1
    sequence: AtLeast1 = 1
    outside_experts: Placement = "sharded"
    drafter: Placement = "sharded"

    def __post_init__(self) -> None:
        for name in AXES:
            if (size := getattr(self, name)) < 1:
                raise KdjaxError(f"mesh {name}={size} must be at least 1")

    @property
    def devices(self) -> int:
        """How many the mesh is made of."""
        return self.expert * self.sequence * self.tensor

    def size(self, axes: Axes) -> int:
        """Parts that the product of `axes` makes."""
        parts = 1
        for axis in axes:
            parts *= getattr(self, axis)
        return parts

    def _used(self, *axes: str) -> Axes:
        return tuple(axis for axis in AXES if axis in axes and getattr(self, axis) > 1)

    # What is split over which axes; empty where it is whole on every device.

    @property
    def all_axes(self) -> Axes:
        """Every axis of more than one part."""
        return self._used(*AXES)

    @property
    def model_axes(self) -> Axes:
        """Of heads, vocabulary and dense widths."""
        return self._used(*AXES) if self.outside_experts == "sharded" else self._used("sequence", "tensor")

    @property
    def expert_axes(self) -> Axes:
        """Of the routed experts."""
        return self._used("expert")

    @property
    def expert_width_axes(self) -> Axes:
        """Of the intermediate width of routed experts."""
        return self._used("sequence", "tensor")

    @property
    def cache_axes(self) -> Axes:
        """Of the rows of the KV cache."""
        return self._used("sequence")

    @property
    def drafter_axes(self) -> Axes:
        """Of the drafter's heads and widths."""
        return self.model_axes if self.drafter == "sharded" else ()


class DeviceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device, as planning needs it; units are powers of ten.

    Attributes:
        kind: name as JAX reports it (`device_kind`).
        memory_gb: memory that a program can use.
        read_gb_per_s: measured rate of reading memory, the ceiling of a decode step.
        all_reduce_us: measured time of the smallest all-reduce between all devices of the mesh.
        all_reduce_gb_per_s: message bytes per second by which an all-reduce grows beyond that.
    """

    kind: str
    memory_gb: Positive
    read_gb_per_s: Positive
    all_reduce_us: Positive | None = None
    all_reduce_gb_per_s: Positive | None = None

    def all_reduce_ms(self, message_bytes: int) -> float | None:
        """Predicted time of one all-reduce; None where it was not measured."""
        if self.all_reduce_us is None or self.all_reduce_gb_per_s is None:
            return None
        return self.all_reduce_us * 1e-3 + message_bytes / self.all_reduce_gb_per_s * 1e-6


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mesh file: the mesh, and the devices it is made of where planning is to know them."""

    mesh: MeshConfig
    device: DeviceConfig | None = None


ONE_DEVICE = MeshConfig()
