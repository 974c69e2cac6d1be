"""What the decode loop asks of a drafter, and DFlash as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from kdjax import drafter as dflash
from kdjax.config import DrafterConfig, ModelConfig
from kdjax.decode.state import DecodeState
from kdjax.model import k2
from kdjax.model.runtime import Runtime
from kdjax.sharding import Rule, draft_cache_rules, drafter_rules


class Params(NamedTuple):
    """Weights of the two models; `drafter` is None where there is none to load."""

    target: Any
    drafter: Any = None


@runtime_checkable
class Drafting(Protocol):
    """A drafter inside the jitted loop. Static: instances are hashable and hold no arrays that are to be trained."""

    @property
    def depth(self) -> int:
        """Tokens drafted per round, block_size - 1."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose residual output `append` receives, in this order."""
        ...

    @property
    def param_rules(self) -> Sequence[Rule]:
        """How `Params.drafter` is split over a mesh (`kdjax.sharding`)."""
        ...

    @property
    def state_rules(self) -> Sequence[Rule]:
        """How the state made by `empty` is split over a mesh."""
        ...

    def empty(self, slots: int, capacity: int) -> Any:
        """The drafter's own state for `slots` streams of up to `capacity` tokens; None if it keeps none."""
        ...

    def propose(self, params: Params, state: DecodeState) -> Float[Array, "slots depth vocab"]:
        """Draft logits for the tokens after `state.bonus`; on a mesh, of this device's part of the vocabulary."""
        ...

    def append(
        self,
        params: Params,
        drafter: Any,
        taps: Float[Array, "slots n tapped"],
        positions: Int[Array, "slots n"],
        n_valid: Int[Array, "slots"],
    ) -> Any:
        """The state with the tokens i < n_valid[s] committed at `positions` (consecutive per slot)."""
        ...


@dataclasses.dataclass(frozen=True)
class DFlash:
    """The DFlash drafter with the embeddings and the lm_head of its target; methods as of `Drafting`."""

    config: DrafterConfig
    target: ModelConfig
    runtime: Runtime

    @property
    def depth(self) -> int:
        return self.config.block_size - 1

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def param_rules(self) -> Sequence[Rule]:
        return drafter_rules(self.config, self.runtime.mesh)

    @property
    def state_rules(self) -> Sequence[Rule]:
        return draft_cache_rules(self.runtime.mesh)

    def empty(self, slots: int, capacity: int) -> dflash.DraftCache:
        return dflash.DraftCache.empty(self.config, slots, capacity, self.runtime.cache_dtype)

    def propose(self, params: Params, state: DecodeState) -> Float[Array, "slots depth vocab"]:
        block = k2.embed(params.target, dflash.block_tokens(self.config, state.bonus), self.runtime)
        hidden = dflash.draft(params.drafter, self.config, block, state.cache.lengths, state.drafter, self.runtime)
        return k2.logits(params.target, self.target, hidden, self.runtime)

    def append(
        self,
        params: Params,
        drafter: dflash.DraftCache,
        taps: Float[Array, "slots n tapped"],
        positions: Int[Array, "slots n"],
        n_valid: Int[Array, "slots"],
    ) -> dflash.DraftCache:
        k, v = dflash.context(params.drafter, self.config, taps, positions, self.runtime)
        return dflash.append(drafter, k, v, positions[:, 0], n_valid)
