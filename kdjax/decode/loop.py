"""The decode loop as jitted programs: prefill of one prompt chunk, and rounds of draft, verify, accept, commit.

Nothing in here leaves the device. Autoregressive and chain decoding are the same program with a smaller tree. On a mesh
the whole program runs inside one `jax.shard_map`; every device goes through the same rounds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from kdjax import tree as ddtree
from kdjax.config import ModelConfig, Sampling
from kdjax.config.decode import Mode
from kdjax.config.mesh import Axes, MeshConfig
from kdjax.decode import budgeting
from kdjax.decode.budgeting import CostAware
from kdjax.decode.drafting import Drafting, Params
from kdjax.decode.sampling import largest, sample
from kdjax.decode.state import DecodeState, Reason, empty_state, state_rules
from kdjax.model import cache as kv
from kdjax.model import k2
from kdjax.model.cache import KVCache
from kdjax.model.runtime import Runtime
from kdjax.sharding import kv_cache_rules, partition, target_specs

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Program:
    """The static part of a decode program. `budget` is that of the mode: 0 when autoregressive, at most the depth of a
    chain; `drafting` is None exactly when it is 0."""

    model: ModelConfig
    runtime: Runtime
    mode: Mode
    budget: int
    sampling: Sampling
    drafting: Drafting | None
    mesh: Mesh | None = None
    """The devices of `runtime.mesh`; None is one device. `kdjax.sharding.alone` of it runs one device's share."""
    policy: CostAware | None = None
    """How many of the drafted nodes a round verifies; None is all of them."""

    @property
    def depth(self) -> int:
        """Drafted tokens that one round can accept."""
        return 0 if self.drafting is None else min(self.drafting.depth, self.budget)

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.drafting is None else self.drafting.taps

    @property
    def vocabulary_axes(self) -> Axes:
        return self.runtime.mesh.model_axes

    @property
    def cuts(self) -> MeshConfig:
        """How the arrays at hand are to be cut: like `runtime.mesh`, unless they are one device's share already."""
        return self.runtime.mesh if self.mesh is None else MeshConfig(**self.mesh.shape)

    def empty_state(self, slots: int, capacity: int) -> DecodeState:
        """All slots free, with room for `capacity` tokens each; arrays are whole, whatever the mesh."""
        mesh = self.runtime.mesh
        parts = mesh.size(mesh.cache_axes)
        cache = KVCache.empty(self.model, slots, capacity, 1 + self.budget, self.runtime.cache_dtype, parts)
        drafter = None if self.drafting is None else self.drafting.empty(slots, capacity)
        return empty_state(cache, drafter, slots, capacity, self.depth)

    def param_specs(self, params: Params) -> Params:
        """PartitionSpecs in the place of the arrays, or shape structs, of `params`.

        Raises:
            KdjaxError: the mesh cannot cut one of them evenly.
        """
        drafting, drafter = self.drafting, params.drafter
        if drafting is not None and drafter is not None:
            drafter = partition(drafter, drafting.param_rules, self.cuts)
        return Params(target_specs(params.target, self.model, self.runtime.mesh, self.cuts), drafter)

    def state_specs(self, state: DecodeState) -> DecodeState:
        """`param_specs` for the state."""
        drafting = self.drafting
        rules = state_rules(kv_cache_rules(self.runtime.mesh), () if drafting is None else drafting.state_rules)
        return partition(state, rules, self.cuts)


class Admission(NamedTuple):
    """The fields of a request that a slot keeps: int32 scalars, the seed uint32, and `stop` int32 [stop tokens]."""

    # Any: the host gives NumPy values, which every process of a mesh may pass on as they are.
    limit: Any
    budget: Any
    seed: Any
    stop: Any


class Report(NamedTuple):
    """Copies of what the host reads after a call, so that the state itself can be donated to the next one."""

    output: Int[Array, "slots capacity"]
    emitted: Int[Array, "slots"]
    reason: Int[Array, "slots"]
    rounds: Int[Array, "slots"]
    accepted_by_depth: Int[Array, "slots depth"]


def on_mesh(
    program: Program, function: Callable[..., T], params: Params, state: DecodeState, *args: Any, out_specs: Any
) -> T:
    """`function(params, state, *args)` inside `jax.shard_map` over the program's mesh, where it sees one device's part.

    `args` are whole on every device. `out_specs` makes the PartitionSpecs of the result, or a tree prefix of them, from
    those of the state.
    """
    if program.mesh is None:
        return function(params, state, *args)
    state_specs = program.state_specs(state)
    whole = tuple(jax.tree.map(lambda _: PartitionSpec(), arg) for arg in args)
    return jax.shard_map(
        function,
        mesh=program.mesh,
        in_specs=(program.param_specs(params), state_specs, *whole),
        out_specs=out_specs(state_specs),
        check_vma=False,  # what is whole is so because every device computes it alike, from sums and gathers
    )(params, state, *args)


def _state_and_report(state_specs: DecodeState) -> tuple[DecodeState, PartitionSpec]:
    return state_specs, PartitionSpec()


def _choose(
    program: Program,
    logits: Float[Array, "slots rows vocab"],
    positions: Int[Array, "slots rows"],
    seeds: UInt32[Array, "slots"],
) -> Int[Array, "slots rows"]:
    """The target's token after each row, -1 (no token) where the logits have no finite maximum."""
    axes = program.vocabulary_axes
    chosen = sample(logits, positions + 1, seeds, program.sampling, axes, backend=program.runtime.backend)
    return jnp.where(jnp.isfinite(largest(logits, axes)[..., 0]), chosen, -1)


def _is_stop(tokens: Int[Array, "slots n"], stop: Int[Array, "slots stop_tokens"]) -> Bool[Array, "slots n"]:
    return jnp.any((tokens[:, :, None] == stop[:, None, :]) & (tokens >= 0)[:, :, None], 2)


def _report(state: DecodeState) -> Report:
    return Report(state.output, state.emitted, state.reason, state.rounds, state.accepted_by_depth)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def prefill(
    program: Program,
    params: Params,
    state: DecodeState,
    slot: Int[Array, ""],
    tokens: Int[Array, "chunk"],
    start: Int[Array, ""],
    n_valid: Int[Array, ""],
    last: Bool[Array, ""],
    admission: Admission,
) -> tuple[DecodeState, Report]:
    """Read tokens i < n_valid of a prompt chunk at positions `start` + i into one slot; other slots stay as they are.

    After the `last` chunk the slot has emitted its first token and runs, unless that token ended it.
    """
    run = functools.partial(read_chunk, program)
    args = (slot, tokens, start, n_valid, last, admission)
    return on_mesh(program, run, params, state, *args, out_specs=_state_and_report)


def read_chunk(
    program: Program,
    params: Params,
    state: DecodeState,
    slot: Int[Array, ""],
    tokens: Int[Array, "chunk"],
    start: Int[Array, ""],
    n_valid: Int[Array, ""],
    last: Bool[Array, ""],
    admission: Admission,
) -> tuple[DecodeState, Report]:
    """`prefill` on one device, or on one device's part."""

    def of_slot(x: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, slot, 1)

    def put(x: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), slot, 0)

    positions = (start + jnp.arange(tokens.shape[0], dtype=jnp.int32))[None]
    cache = dataclasses.replace(jax.tree.map(of_slot, state.cache), lengths=start[None])
    out = k2.forward(
        params.target,
        program.model,
        tokens[None],
        positions,
        cache,
        n_valid=n_valid[None],
        taps=program.taps,
        runtime=program.runtime,
    )
    drafter = state.drafter
    if program.drafting is not None:
        one = program.drafting.append(params, jax.tree.map(of_slot, drafter), out.taps, positions, n_valid[None])
        drafter = jax.tree.map(put, drafter, one)

    end = lax.dynamic_slice_in_dim(out.hidden, n_valid - 1, 1, axis=1)
    logits = k2.logits(params.target, program.model, end, program.runtime)
    token = _choose(program, logits, (start + n_valid - 1)[None, None], admission.seed[None])
    reason = jnp.where(admission.limit == 1, Reason.LENGTH, Reason.RUNNING)
    reason = jnp.where(_is_stop(token, admission.stop[None])[0, 0], Reason.STOP, reason)
    reason = jnp.where(token[0, 0] < 0, Reason.NOT_FINITE, reason)
    emitted = (last & (token[0, 0] >= 0)).astype(jnp.int32)
    committed = dataclasses.replace(out.cache, lengths=(start + n_valid)[None])
    state = DecodeState(
        cache=jax.tree.map(put, state.cache, committed),
        drafter=drafter,
        bonus=put(state.bonus, token[0]),
        output=lax.dynamic_update_slice(state.output, token, (slot, jnp.zeros_like(slot))),
        emitted=put(state.emitted, emitted[None]),
        reason=put(state.reason, jnp.where(last, reason, Reason.FREE)[None]),
        limit=put(state.limit, admission.limit[None]),
        budget=put(state.budget, admission.budget[None]),
        seed=put(state.seed, admission.seed[None]),
        stop=put(state.stop, admission.stop[None]),
        rounds=put(state.rounds, jnp.zeros((1,), jnp.int32)),
        accepted_by_depth=put(state.accepted_by_depth, jnp.zeros_like(state.accepted_by_depth[:1])),
    )
    return state, _report(state)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def decode(
    program: Program, params: Params, state: DecodeState, max_rounds: Int[Array, ""], min_running: Int[Array, ""]
) -> tuple[DecodeState, Report]:
    """Rounds until `max_rounds` are done or fewer than `min_running` slots run.

    `min_running` 1 runs every slot to its end; the number of running slots returns as soon as one is free.
    """
    run = functools.partial(run_rounds, program)
    return on_mesh(program, run, params, state, max_rounds, min_running, out_specs=_state_and_report)


def run_rounds(
    program: Program, params: Params, state: DecodeState, max_rounds: Int[Array, ""], min_running: Int[Array, ""]
) -> tuple[DecodeState, Report]:
    """`decode` on one device, or on one device's part."""

    def unfinished(carry: tuple[Array, DecodeState]) -> Bool[Array, ""]:
        done, state = carry
        return (done < max_rounds) & (jnp.sum(state.reason == Reason.RUNNING, dtype=jnp.int32) >= min_running)

    def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        done, state = carry
        return done + 1, one_round(program, params, state)

    _, state = lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), state))
    return state, _report(state)


def draft(program: Program, params: Params, state: DecodeState) -> ddtree.Tree:
    """The tree of this round: drafted within each slot's budget, or the root alone."""
    if program.drafting is None:
        return ddtree.root_only(state.bonus)
    logits = program.drafting.propose(params, state)
    build = ddtree.chain if program.mode == "chain" else ddtree.build
    axes, backend = program.vocabulary_axes, program.runtime.backend
    return build(logits, state.bonus, program.budget, state.budget, axes, backend=backend)


def verify(
    program: Program, params: Params, state: DecodeState, tree: ddtree.Tree
) -> tuple[k2.Forward, Float[Array, "slots rows vocab"]]:
    """The target over root and nodes, and its logits (of this device's part of the vocabulary) at every row."""
    out = k2.forward(
        params.target,
        program.model,
        tree.tokens,
        tree.positions(state.cache.lengths),
        state.cache,
        # A chain is causal: no mask to read in the attention op.
        ancestors=tree.ancestors if program.mode == "tree" and program.budget else None,
        n_valid=tree.n_valid,
        taps=program.taps,
        runtime=program.runtime,
    )
    return out, k2.logits(params.target, program.model, out.hidden, program.runtime)


class Round(NamedTuple):
    """What a round did, for studies of it; padding and slots that do not run included."""

    tree: ddtree.Tree
    accepted: ddtree.Acceptance
    routing: tuple[Int[Array, "slots rows top_k"], ...]
    """The routed experts of every row, per MoE layer."""


def one_round(program: Program, params: Params, state: DecodeState) -> DecodeState:
    """Draft, verify, accept, commit. Slots that do not run keep every field but their scratch cache rows."""
    if program.policy is None:
        return observed_round(program, params, state)[0]
    tree = draft(program, params, state)
    budgets, index = budgeting.choose(program.policy, tree, state.reason == Reason.RUNNING)
    # One loop per width, of which one turns once: XLA would copy the caches into and out of each branch of a switch.
    for i, width in enumerate(program.policy.widths):

        def chosen(carry: tuple[Array, DecodeState], i: int = i) -> Bool[Array, ""]:
            return carry[0] == i

        def finish(carry: tuple[Array, DecodeState], width: int = width) -> tuple[Array, DecodeState]:
            index, state = carry
            narrow = budgeting.narrow(tree, budgets, width)
            return jnp.full_like(index, -1), finish_round(program, params, state, narrow)[0]

        index, state = lax.while_loop(chosen, finish, (index, state))
    return state


def observed_round(program: Program, params: Params, state: DecodeState) -> tuple[DecodeState, Round]:
    """A round at the full budget, and what it did."""
    return finish_round(program, params, state, draft(program, params, state))


def finish_round(program: Program, params: Params, state: DecodeState, tree: ddtree.Tree) -> tuple[DecodeState, Round]:
    """Verify, accept, commit."""
    out, logits = verify(program, params, state, tree)
    posterior, accepted = accept(program, state, tree, logits)
    return commit(program, params, state, out, posterior, accepted), Round(tree, accepted, out.routing)


def accept(
    program: Program, state: DecodeState, tree: ddtree.Tree, logits: Float[Array, "slots rows vocab"]
) -> tuple[Int[Array, "slots rows"], ddtree.Acceptance]:
    """The target's token after each row, and the path on which the tree agrees with it."""
    posterior = _choose(program, logits, tree.positions(state.cache.lengths), state.seed)
    return posterior, ddtree.accept(tree, posterior, program.depth)


def commit(
    program: Program,
    params: Params,
    state: DecodeState,
    out: k2.Forward,
    posterior: Int[Array, "slots rows"],
    accepted: ddtree.Acceptance,
) -> DecodeState:
    """Emit the accepted path up to a stop or the limit, and keep exactly its cache rows and drafter context.

    The last emitted token is always the one the target has not read: the next root.
    """
    running = state.reason == Reason.RUNNING
    starts = state.cache.lengths
    index = jnp.arange(program.depth + 1, dtype=jnp.int32)[None, :]
    path = jnp.take_along_axis(posterior, accepted.rows, 1)  # the token after each accepted row

    count = jnp.where(running, accepted.n_accepted - (accepted.bonus < 0).astype(jnp.int32), 0)
    stops = _is_stop(path, state.stop) & (index < count[:, None])
    first_stop = jnp.min(jnp.where(stops, index, program.depth + 1), 1)
    count = jnp.minimum(jnp.minimum(count, first_stop + 1), state.limit - state.emitted)
    count = jnp.maximum(count, 0)
    stopped = first_stop < count
    emitted = state.emitted + count

    reason = jnp.where(running & (accepted.bonus < 0), Reason.NOT_FINITE, state.reason)
    reason = jnp.where(running & (emitted >= state.limit), Reason.LENGTH, reason)
    reason = jnp.where(running & stopped, Reason.STOP, reason).astype(jnp.int32)

    slot = jnp.arange(starts.shape[0], dtype=jnp.int32)[:, None]
    capacity = state.output.shape[1]
    column = jnp.where(index < count[:, None], state.emitted[:, None] + index, capacity)
    newest = jnp.take_along_axis(path, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]

    drafter = state.drafter
    if program.drafting is not None:
        taps = jnp.take_along_axis(out.taps, accepted.rows[:, :, None], 1)
        drafter = program.drafting.append(params, drafter, taps, starts[:, None] + index, count)
    if program.mode == "tree":
        cache = kv.commit(out.cache, accepted.rows, count, program.runtime.mesh.cache_axes)
    else:  # accepted rows of a chain are in place already
        cache = dataclasses.replace(out.cache, lengths=starts + count)
    depths = jnp.arange(1, state.accepted_by_depth.shape[1] + 1, dtype=jnp.int32)[None, :]
    reached = (depths < accepted.n_accepted[:, None]) & running[:, None]
    return dataclasses.replace(
        state,
        cache=cache,
        drafter=drafter,
        bonus=jnp.where(count > 0, newest, state.bonus),
        output=state.output.at[slot, column].set(path, mode="drop"),
        emitted=emitted,
        reason=reason,
        rounds=state.rounds + running.astype(jnp.int32),
        accepted_by_depth=state.accepted_by_depth + reached.astype(jnp.int32),
    )
