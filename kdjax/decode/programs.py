"""The device's side of decoding: models in place, a state of empty slots, compiled programs of one capacity."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kdjax import drafter as dflash
from kdjax.checkpoint import Drafter, Target
from kdjax.config import DecodeConfig, check_pair
from kdjax.config.decode import need_integers
from kdjax.decode import loop
from kdjax.decode.budgeting import CostAware
from kdjax.decode.drafting import DFlash, Drafting, Params
from kdjax.decode.limits import compiled_budget
from kdjax.decode.request import MAX_STOP_TOKENS, Request
from kdjax.decode.state import DecodeState
from kdjax.errors import KdjaxError
from kdjax.model import k2
from kdjax.model.runtime import Runtime, require_device
from kdjax.sharding import make_mesh, place, shardings

WEIGHT_FIRST: dict[str, str | bool] = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""Eigen's products instead of YNN's. With the weight on the left, a round with a tree takes 0.9 of the time, a row as
long as before; and YNN makes kernels at first use, which would count as decoding."""


class Compiled:
    """Programs of one capacity, compiled side by side: the first prompt does not wait for the decode program."""

    def __init__(self, prefill: jax.stages.Lowered, decode: jax.stages.Lowered, options: dict[str, str | bool]):
        """`options` are the compiler's for decoding."""
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            self._prefill = pool.submit(prefill.compile)
            self._decode = pool.submit(decode.compile, options)
            pool.shutdown(wait=False)

    @property
    def prefill(self) -> jax.stages.Compiled:
        return self._prefill.result()

    @property
    def decode(self) -> jax.stages.Compiled:
        return self._decode.result()


class Programs:
    """Two models on their devices, and what decodes with them over `slots` streams: one set of programs per capacity.

    Args:
        target: the loaded target model.
        drafter: the loaded drafter; None where `config` drafts nothing or `drafting` is given.
        config: how to decode.
        runtime: numerics, the same as the models were loaded with.
        slots: streams that run at once.
        context: most tokens (prompt and new) per stream; default is the target's max_position_embeddings.
        drafting: another drafter for the loop than DFlash.
        mesh: the devices of `runtime.mesh`; default is `kdjax.sharding.make_mesh` of it. Params that do not lie there
            yet are put there.
        policy: how many of the drafted nodes each round verifies; default is all of them.

    `params` may be replaced by weights of the same shapes and types; nothing is compiled again.

    Raises:
        KdjaxError: the drafter does not fit the target, is missing, or the budget is too large; the models were loaded
            with another runtime; or the mesh or the kernels do not fit the model or the machine.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: DecodeConfig,
        runtime: Runtime,
        *,
        slots: int = 1,
        context: int | None = None,
        drafting: Drafting | None = None,
        mesh: Mesh | None = None,
        policy: CostAware | None = None,
    ):
        require_device(runtime.backend)
        need_integers(slots=slots, **({} if context is None else {"context": context}))
        if slots < 1:
            raise KdjaxError(f"slots={slots} must be at least 1")
        limit = target.config.max_position_embeddings
        if context is not None and not 0 < context <= limit:
            raise KdjaxError(f"context={context} must lie in 1 to the model's max_position_embeddings={limit}")
        if drafter is not None:
            check_pair(target.config, drafter.config, allow_mismatch=drafter.mismatch_allowed)
            if drafting is None:
                drafting = DFlash(drafter.config, target.config, runtime)
        _check_params("target", target.params, k2.abstract_params(target.config, runtime))
        if isinstance(drafting, DFlash) and drafter is not None:
            _check_params("drafter", drafter.params, dflash.abstract_params(drafter.config, runtime))
        budget = 0 if config.mode == "autoregressive" else config.budget
        if budget and drafting is None:
            raise KdjaxError(f"mode={config.mode} with budget={budget} needs a drafter: give one or use autoregressive")
        if drafting is not None:
            budget = compiled_budget(config, drafting.depth, target.config.vocab_size)
        if policy is not None and (config.mode != "tree" or policy.widths[-1] != budget):
            raise KdjaxError(
                f"the policy's widths end with {policy.widths[-1]}, mode={config.mode} has budget={budget}: use mode "
                "tree and the last width as its budget"
            )
        self.config, self.slots = config, slots
        self.context = limit if context is None else context
        self.chunk = min(config.prefill_chunk, self.context)
        if mesh is None and runtime.mesh.devices > 1:
            mesh = make_mesh(runtime.mesh)
        self.program = loop.Program(
            target.config, runtime, config.mode, budget, config.sampling, drafting if budget else None, mesh, policy
        )
        self.params = self.place(Params(target.params, drafter.params if drafter is not None and budget else None))
        self._compiled: dict[int, Compiled] = {}

    def place(self, params: Params) -> Params:
        """`params` on the mesh, split as its program takes them; as they are on one device."""
        if self.program.mesh is None:
            return params
        return place(params, shardings(self.program.param_specs(params), self.program.mesh))

    def capacity_for(self, needed: int) -> int:
        """Token rows per slot: powers of two from 64, so that few programs are compiled, within the context."""
        power = 64
        while power < needed:
            power *= 2
        return min(power, -(-self.context // 64) * 64)

    def empty(self, capacity: int) -> DecodeState:
        """The state of free slots with room for `capacity` tokens each, split as the programs take it."""
        make = functools.partial(self.program.empty_state, self.slots, capacity)
        if self.program.mesh is None:
            return make()
        specs = self.program.state_specs(jax.eval_shape(make))
        return jax.jit(make, out_shardings=shardings(specs, self.program.mesh))()

    def compiled(self, capacity: int, state: DecodeState) -> Compiled:
        """The programs for states like `state`; their compilation begins here and may still go on."""
        if capacity not in self._compiled:
            scalar = np.int32(0)
            chunk = np.zeros(self.chunk, np.int32)
            admission = loop.Admission(scalar, scalar, np.uint32(0), np.zeros(MAX_STOP_TOKENS, np.int32))
            self._compiled[capacity] = Compiled(
                loop.prefill.lower(
                    self.program, self.params, state, scalar, chunk, scalar, scalar, np.bool_(True), admission
                ),
                loop.decode.lower(self.program, self.params, state, scalar, scalar),
                WEIGHT_FIRST if self.program.runtime.layout == "fused" else {},
            )
        return self._compiled[capacity]

    def edit(self, change: Callable[..., DecodeState], state: DecodeState, *at: np.int32) -> jax.stages.Compiled:
        """The program of `change(state, *at)`, which changes the state in place and leaves it split as it is."""
        split = None
        if self.program.mesh is not None:
            split = shardings(self.program.state_specs(state), self.program.mesh)
        return jax.jit(change, donate_argnums=0, out_shardings=split).lower(state, *at).compile()

    def prefill(
        self, compiled: Compiled, state: DecodeState, slot: int, request: Request, held: int = 0
    ) -> tuple[DecodeState, loop.Report]:
        """Read a prompt into a slot, chunk by chunk, but for its first `held` tokens, whose rows the slot holds."""
        admission = admit(request, self.program.budget)
        size, prompt = self.chunk, np.asarray(request.prompt_ids, np.int32)
        report = None
        for start in range(held, len(prompt), size):
            piece = prompt[start : start + size]
            chunk = np.zeros(size, np.int32)
            chunk[: len(piece)] = piece
            state, report = compiled.prefill(
                self.params,
                state,
                np.int32(slot),
                chunk,
                np.int32(start),
                np.int32(len(piece)),
                np.bool_(start + size >= len(prompt)),
                admission,
            )
        assert report is not None  # the prompt is not empty
        return state, report


def _check_params(role: str, params: Any, expected: Any) -> None:
    found, needed = (jax.tree.map(lambda a: (a.shape, jnp.dtype(a.dtype)), tree) for tree in (params, expected))
    if jax.tree.structure(params) != jax.tree.structure(expected) or found != needed:
        raise KdjaxError(
            f"the {role} was loaded with another runtime than the decoder's: give the decoder that of load_{role}"
        )


def admit(request: Request, budget: int) -> loop.Admission:
    """What a slot keeps of a request; `budget` is the compiled one."""
    stop = np.full(MAX_STOP_TOKENS, -1, np.int32)
    stops = sorted(set(request.stop_token_ids))
    stop[: len(stops)] = stops
    budget = budget if request.budget is None else min(request.budget, budget)
    return loop.Admission(np.int32(request.max_new_tokens), np.int32(budget), np.uint32(request.seed), stop)
