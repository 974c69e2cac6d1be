"""Edits of single slots between calls: rows that two prompts share, clearing them, and letting a slot go."""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jaxtyping import Array, Int

from kdjax.decode.state import DecodeState, Reason


def copy_rows(state: DecodeState, source: Int[Array, ""], slot: Int[Array, ""]) -> DecodeState:
    """The cache rows of slot `source`, of both models, in `slot` too, for a prefill that starts behind them."""

    def copy(x: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, source, 1), slot, 0)

    cache, drafter = jax.tree.map(copy, (state.cache, state.drafter))
    return dataclasses.replace(state, cache=cache, drafter=drafter)


def wipe(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """Zeros in the cache rows of the slot, of both models. A mask hides what another request left there, but not NaN:
    zero times NaN is NaN."""

    def clear(x: Array) -> Array:
        return x.at[slot].set(0)

    cache, drafter = jax.tree.map(clear, (state.cache, state.drafter))
    return dataclasses.replace(state, cache=cache, drafter=drafter)


def release(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """The slot runs no more; its rows stay until another request takes them."""
    return dataclasses.replace(state, reason=state.reason.at[slot].set(int(Reason.FREE)))
