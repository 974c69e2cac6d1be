"""Everything a decode program carries from round to round, per slot, as one value."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kdjax.decode.request import MAX_STOP_TOKENS
from kdjax.model.cache import KVCache
from kdjax.sharding import Rule


class Reason(enum.IntEnum):
    """Why a slot does not run; all but RUNNING are inert."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    NOT_FINITE = 3
    FREE = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """State of all slots, int32 unless said. Donated to every program: the caches are never copied."""

    # Any: as a pytree the state also carries shape structs, argument infos and shardings in place of its arrays.
    cache: KVCache
    """Target KV rows and committed lengths; the token at position `lengths` is `bonus`."""
    drafter: Any
    """The drafter's own state (its context cache), in lockstep with the KV rows; None without a drafter."""
    bonus: Any
    """[slots]: The newest token: chosen by the target, emitted, not yet read by it. Root of the next tree."""
    output: Any
    """[slots, capacity]: Emitted tokens."""
    emitted: Any
    """[slots]: Tokens in `output`, the first one (from the prompt) included."""
    reason: Any
    """[slots]: A `Reason`."""
    limit: Any
    """[slots]: max_new_tokens."""
    budget: Any
    """[slots]: Tree nodes allowed, at most the compiled budget."""
    seed: Any
    """uint32 [slots]: Sampling seed."""
    stop: Any
    """[slots, stop tokens]: Stop token ids, padded with -1."""
    rounds: Any
    """[slots]: Verify rounds run."""
    accepted_by_depth: Any
    """[slots, depth]: Rounds in which the draft at depth d + 1 was accepted, before any cut by a stop or the limit.
    One unused column where the depth is 0."""


def empty_state(cache: KVCache, drafter: Any, slots: int, capacity: int, depth: int) -> DecodeState:
    """All slots free; `capacity` bounds the tokens emitted per slot, `depth` is the drafted depth."""

    # Separate buffers: a donated buffer can be donated only once.
    def zeros() -> Int[Array, "slots"]:
        return jnp.zeros((slots,), jnp.int32)

    return DecodeState(
        cache=cache,
        drafter=drafter,
        bonus=zeros(),
        output=jnp.zeros((slots, capacity), jnp.int32),
        emitted=zeros(),
        reason=jnp.full((slots,), np.int32(Reason.FREE)),
        limit=zeros(),
        budget=zeros(),
        seed=jnp.zeros((slots,), jnp.uint32),
        stop=jnp.full((slots, MAX_STOP_TOKENS), -1, jnp.int32),
        rounds=zeros(),
        # Not empty: XLA crashes on an empty argument of a program for several GPUs (jaxlib 0.11.2).
        accepted_by_depth=jnp.zeros((slots, max(depth, 1)), jnp.int32),
    )


def state_rules(kv_rules: Sequence[Rule], drafter_rules: Sequence[Rule]) -> list[Rule]:
    """How a `DecodeState` is split over a mesh: its caches as given, everything else whole on every device."""
    caches = {"cache": kv_rules, "drafter": drafter_rules}
    nested = [rule._replace(pattern=f"{name}.{rule.pattern}") for name, rules in caches.items() for rule in rules]
    return nested + [Rule(field.name) for field in dataclasses.fields(DecodeState) if field.name not in caches]
