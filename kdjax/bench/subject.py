"""What is measured: a decode program with weights and caches of random values, made on the devices that hold them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdjax import drafter as dflash
from kdjax.checkpoint.synth import shorten
from kdjax.config import MeshConfig, ModelPair, Sampling
from kdjax.decode import loop
from kdjax.decode.drafting import DFlash, Params
from kdjax.decode.state import DecodeState, Reason
from kdjax.errors import KdjaxError
from kdjax.model import k2
from kdjax.model.runtime import Backend, Dtype, Runtime
from kdjax.plan.memory import Workload
from kdjax.sharding import alone, make_mesh, shardings, share
from kdjax.sharding.rules import dotted
from pallas_kernels.int4_experts.layout import BLOCK_COLUMNS, PLANE_COLUMNS

NEVER_ENDS = 2**30
SLACK = 256
"""Rows of the caches beyond the context, for tokens that are committed while it is measured."""
_CODE_DEVIATION = 4.2
"""Of the INT4 codes: a scale divided by it gives a weight of deviation 1."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model on devices: `mesh` is None on one, `rank_of` the mesh of which one device's share runs alone."""

    pair: ModelPair
    runtime: Runtime
    mesh: Mesh | None
    rank_of: MeshConfig | None

    @classmethod
    def of(
        cls,
        pair: ModelPair,
        config: MeshConfig,
        backend: Backend,
        devices: Sequence[Any],
        *,
        rank: bool,
        dtype: Dtype = "bfloat16",
    ) -> Subject:
        """Raises KdjaxError where one device cannot run its share alone, or the mesh has too many devices."""
        if rank and config.cache_axes:
            raise KdjaxError(
                f"mesh sequence={config.sequence}: a rank attends with the others, not alone: use a mesh of sequence=1"
            )
        if rank and config.devices == 1:
            raise KdjaxError("a rank's share needs a mesh of several devices: give such a file, or use --mesh")
        runtime = Runtime(compute_dtype=dtype, cache_dtype=dtype, backend=backend, mesh=config)
        if rank:
            return cls(pair, runtime, alone(devices[0]), config)
        return cls(pair, runtime, make_mesh(config, devices) if config.devices > 1 else None, None)

    @property
    def exchanges(self) -> bool:
        """Whether devices exchange anything."""
        return self.mesh is not None and self.rank_of is None

    def rank(self) -> Subject:
        """The share of the mesh's first device, alone on it."""
        assert self.mesh is not None and self.rank_of is None
        first, of = self.mesh.devices.flat[:1].tolist(), self.runtime
        return Subject.of(self.pair, of.mesh, of.backend, first, rank=True, dtype=of.compute_dtype)

    def share_of_rank(self, tree: Any) -> Any:
        """What the first device of this subject's mesh holds of `tree`, for `rank()`. Nothing is copied."""
        assert self.mesh is not None
        first = self.mesh.devices.flat[0]
        here = alone(first)

        def own(leaf: jax.Array) -> jax.Array:
            assert isinstance(leaf.sharding, NamedSharding)
            (part,) = (s.data for s in leaf.addressable_shards if s.device == first)
            where = NamedSharding(here, leaf.sharding.spec)
            return jax.make_array_from_single_device_arrays(part.shape, where, [part])

        return jax.tree.map(own, tree)

    def program(self, budget: int) -> loop.Program:
        """Of greedy tree decoding; budget 0 is autoregressive decoding."""
        drafting = None
        if budget:
            if self.pair.drafter is None:
                raise KdjaxError(f"budget {budget} needs a drafter: give a model file with one, or measure 1 token")
            drafting = DFlash(self.pair.drafter, self.pair.target, self.runtime)
        mode = "tree" if budget else "autoregressive"
        return loop.Program(self.pair.target, self.runtime, mode, budget, Sampling(), drafting, self.mesh)

    def abstract_params(self) -> Placed:
        """Of target and drafter."""
        drafter = self.pair.drafter
        whole = Params(
            k2.abstract_params(self.pair.target, self.runtime),
            None if drafter is None else dflash.abstract_params(drafter, self.runtime),
        )
        # A program without a mesh of its own cuts what is whole.
        program = dataclasses.replace(self.program(1 if drafter else 0), mesh=None)
        return self._placed(whole, program.param_specs(whole))

    def abstract_state(self, workload: Workload) -> Placed:
        program = dataclasses.replace(self.program(workload.budget), mesh=None)
        whole = jax.eval_shape(lambda: program.empty_state(workload.streams, workload.context + SLACK))
        return self._placed(whole, program.state_specs(whole))

    def _placed(self, whole: Any, specs: Any) -> Placed:
        return Placed(share(whole, specs, self.runtime.mesh), specs)

    def params(self, seed: int = 0) -> Params:
        """Random weights; every part is made on the device that holds it, layer by layer."""
        own, specs = self.abstract_params()
        made = []
        for i, (tree, where) in enumerate(zip(own, specs, strict=True)):
            if tree is None:
                made.append(None)
                continue
            keys = jax.random.split(jax.random.key(seed + i, impl="rbg"), len(tree) + len(tree["layers"]))
            parts: dict[Any, Any] = {"layers": {}}
            names = [(name,) for name in tree if name != "layers"] + [("layers", n) for n in tree["layers"]]
            for key, path in zip(keys, names, strict=False):
                part, spec = (functools.reduce(lambda node, name: node[name], path, t) for t in (tree, where))
                value = self._make(part, spec, path[0] == "embed_tokens")(key)
                (parts if len(path) == 1 else parts["layers"])[path[-1]] = value
            made.append(parts)
        return Params(*made)

    def _make(self, part: Any, specs: Any, unit: bool) -> Callable[[jax.Array], Any]:
        leaves, structure = jax.tree_util.tree_flatten_with_path(part)
        split = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
        values = tuple(
            _Value(dotted(path[-1:]), leaf.shape, jnp.dtype(leaf.dtype), spec, unit)
            for (path, leaf), spec in zip(leaves, split, strict=True)
        )
        return _maker(self.mesh, structure, values)

    def state(self, workload: Workload, seed: int = 1) -> DecodeState:
        """All streams running at `workload.context` committed tokens, caches full of random rows."""
        own, specs = self.abstract_state(workload)
        state = self._make(own, specs, True)(jax.random.key(seed, impl="rbg"))
        fields = self.on_devices(
            {
                "bonus": jnp.arange(1, workload.streams + 1, dtype=jnp.int32),
                "reason": jnp.full((workload.streams,), int(Reason.RUNNING), jnp.int32),
                "limit": jnp.full((workload.streams,), NEVER_ENDS, jnp.int32),
                "budget": jnp.full((workload.streams,), workload.budget, jnp.int32),
                "stop": jnp.full(own.stop.shape, -1, jnp.int32),
            }
        )
        return self.rewound(dataclasses.replace(state, **fields), workload)

    def rewound(self, state: DecodeState, workload: Workload) -> DecodeState:
        """Back at the context: what was committed while it was measured is forgotten."""
        lengths = self.on_devices(jnp.full((workload.streams,), workload.context, jnp.int32))
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, lengths=lengths))

    def on_devices(self, tree: Any) -> Any:
        """The same arrays, whole on every device."""
        if self.mesh is None:
            return tree
        return jax.device_put(tree, shardings(jax.tree.map(lambda _: PartitionSpec(), tree), self.mesh))


class Placed(NamedTuple):
    """Shape structs of what one device holds, and the PartitionSpecs that make it the whole."""

    own: Any
    specs: Any


class _Value(NamedTuple):
    """One array of random values; `unit`: of size 1, whatever it multiplies."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    unit: bool

    def draw(self, key: jax.Array) -> jax.Array:
        """Weights keep the size of what they multiply; INT4 words have all codes."""
        for axes in filter(None, self.spec):
            for axis in (axes,) if isinstance(axes, str) else axes:
                key = jax.random.fold_in(key, lax.axis_index(axis))
        if self.name.endswith("scales"):  # pairs of bf16
            scale = self._scale(key, (*self.shape, 2), self.shape[2] * BLOCK_COLUMNS)
            return lax.bitcast_convert_type(scale, jnp.int32)
        if self.name == "scale":
            return self._scale(key, self.shape, self.shape[-1] * PLANE_COLUMNS)
        if self.name == "packed":
            return _symmetric_codes(jax.random.bits(key, self.shape, jnp.uint32))
        if self.name.endswith("words"):
            return lax.bitcast_convert_type(_symmetric_codes(jax.random.bits(key, self.shape, jnp.uint16)), jnp.int16)
        if not jnp.issubdtype(self.dtype, jnp.floating):
            return jnp.zeros(self.shape, self.dtype)
        if len(self.shape) == 1:
            return jnp.full(self.shape, 0.0 if "bias" in self.name else 1.0, self.dtype)
        size = 1.0 if self.unit else self.shape[-1] ** -0.5
        return jax.random.normal(key, self.shape, self.dtype) * jnp.asarray(size, self.dtype)

    def _scale(self, key: jax.Array, shape: tuple[int, ...], columns: int) -> jax.Array:
        mean = columns**-0.5 / _CODE_DEVIATION
        return jax.random.uniform(key, shape, jnp.bfloat16, 0.5 * mean, 1.5 * mean)


def _symmetric_codes(words: jax.Array) -> jax.Array:
    """INT4 codes -7 to 7 with the mean 0: -8 becomes 0.

    Codes with a mean other than 0 give every output a part in one direction. It grows from layer to layer, until all
    tokens are alike and choose the same experts, far fewer than those of real text.
    """
    ones = jnp.asarray(int("1" * (words.dtype.itemsize * 2), 16), words.dtype)
    used = (words | words >> 1 | words >> 2 | words >> 3) & ones
    return words | (used ^ ones) << 3


@functools.lru_cache(maxsize=64)
def _maker(mesh: Mesh | None, structure: Any, values: tuple[_Value, ...]) -> Callable[[jax.Array], Any]:
    """The jitted maker of one part, shared by all layers that are alike."""

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(values))
        return jax.tree.unflatten(structure, [v.draw(k) for v, k in zip(values, keys, strict=True)])

    if mesh is None:
        return jax.jit(make)
    specs = jax.tree.unflatten(structure, [value.spec for value in values])
    return jax.jit(jax.shard_map(make, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs, check_vma=False))


def hundredth(pair: ModelPair) -> ModelPair:
    """A model of the same structure with few layers and small matrices, for trying a measurement; cut up to eight ways.

    The drafter keeps its last two layers, of which K2.6's slide and attend fully.
    """
    layers, window = min(2, pair.target.num_hidden_layers), 64
    target, drafter = shorten(pair.target, pair.drafter, layers)
    alike: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": 128,
        "num_attention_heads": 16,
        "intermediate_size": 256,
    }
    target = msgspec.structs.replace(
        target,
        **alike,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        moe_intermediate_size=1024,
        n_routed_experts=8,
        num_experts_per_tok=2,
    )
    if drafter is not None:
        small: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 16, "mask_token_id": alike["vocab_size"] - 1}
        small |= {"sliding_window": None if drafter.sliding_window is None else window}
        small |= {"layer_types": drafter.layer_types[-2:], "num_hidden_layers": len(drafter.layer_types[-2:])}
        drafter = msgspec.structs.replace(drafter, **alike, **small)
    return ModelPair(target=target, drafter=drafter)
