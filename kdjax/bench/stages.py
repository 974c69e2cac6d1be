"""The stages of a round, and the parts of a verify forward, each as a program that repeats it on the device.

A repetition depends on the one before, or XLA would move its work out of the loop. Where it does not by itself,
`never` makes it so: a flag that is never set and that XLA cannot foresee.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from kdjax import tree as ddtree
from kdjax.decode import loop
from kdjax.decode.drafting import Params
from kdjax.decode.state import DecodeState
from kdjax.model import k2, parallel, sequence
from kdjax.model.experts import MoE
from pallas_kernels.tree_attention import tree_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """What stages hand to each other. On a mesh, logits are those of a device's part of the vocabulary."""

    tree: Any
    hidden: Any
    """[slots, rows, hidden]: what the parts of a forward read and write."""
    logits: Any
    """[slots, rows, vocab]"""
    posterior: Any
    """[slots, rows]: the target's tokens."""
    accepted: Any
    draft_logits: Any = None
    """[slots, depth, vocab]; None, like the taps, where nothing is drafted."""
    taps: Any = None
    """[slots, rows, taps * hidden]"""
    routing: Any = None
    """[MoE layers, slots, rows, top_k]: experts of the last verify forward; None without MoE layers."""


Stage = Callable[[loop.Program, Params, DecodeState, Work], tuple[DecodeState, Work]]


def never(x: jax.Array) -> jax.Array:
    return jnp.max(x) > jnp.asarray(1e30, x.dtype)


def touch(x: jax.Array, by: jax.Array) -> jax.Array:
    """`x`, of which XLA thinks that `by` may change an element."""
    first = (0,) * x.ndim
    return x.at[first].add(never(by).astype(x.dtype))


def draft(program: loop.Program, params: Params, state: DecodeState, work: Work) -> tuple[DecodeState, Work]:
    assert program.drafting is not None
    logits = program.drafting.propose(params, state)
    return dataclasses.replace(state, bonus=touch(state.bonus, logits)), work


def build(program: loop.Program, params: Params, state: DecodeState, work: Work) -> tuple[DecodeState, Work]:
    axes, backend = program.vocabulary_axes, program.runtime.backend
    tree = ddtree.build(work.draft_logits, state.bonus, program.budget, state.budget, axes, backend=backend)
    return state, dataclasses.replace(work, tree=tree, draft_logits=touch(work.draft_logits, tree.scores))


def verify(program: loop.Program, params: Params, state: DecodeState, work: Work) -> tuple[DecodeState, Work]:
    out, logits = loop.verify(program, params, state, work.tree)
    tree = dataclasses.replace(work.tree, tokens=touch(work.tree.tokens, logits))
    taps = None if program.drafting is None else out.taps
    routing = jnp.stack(out.routing) if out.routing else None
    work = dataclasses.replace(work, tree=tree, hidden=out.hidden, logits=logits, taps=taps, routing=routing)
    return dataclasses.replace(state, cache=out.cache), work


def accept(program: loop.Program, params: Params, state: DecodeState, work: Work) -> tuple[DecodeState, Work]:
    posterior, accepted = loop.accept(program, state, work.tree, work.logits)
    logits = touch(work.logits, accepted.bonus.astype(jnp.float32))
    return state, dataclasses.replace(work, posterior=posterior, accepted=accepted, logits=logits)


def commit(program: loop.Program, params: Params, state: DecodeState, work: Work) -> tuple[DecodeState, Work]:
    # `emitted` is never negative: the gathers of accepted rows stay inside the loop.
    rows = jnp.where(state.emitted[:, None] >= 0, work.accepted.rows, 0)
    out = k2.Forward(work.hidden, work.taps, state.cache)
    return loop.commit(program, params, state, out, work.posterior, work.accepted._replace(rows=rows)), work


def mla(
    layers: tuple[int, ...], program: loop.Program, params: Params, state: DecodeState, work: Work
) -> tuple[DecodeState, Work]:
    """Norm, projections, rotation, cache rows and attention, without the all-reduce."""
    blocks, step, x, latent = *_blocks(program, params, state, work), work.hidden, list(state.cache.latent)
    for i in layers:
        x, latent[i] = blocks[i].self_attn(x, blocks[i].input_layernorm, latent[i], step)
    cache = dataclasses.replace(state.cache, latent=tuple(latent))
    return dataclasses.replace(state, cache=cache), dataclasses.replace(work, hidden=x)


def attention(
    layers: tuple[int, ...], program: loop.Program, params: Params, state: DecodeState, work: Work
) -> tuple[DecodeState, Work]:
    """The attention op alone; queries are the result of the layer before."""
    c, runtime = program.model, program.runtime
    step = _blocks(program, params, state, work)[1]
    mesh = runtime.mesh
    attend = functools.partial(sequence.attend, axes=mesh.cache_axes) if mesh.cache_axes else tree_attention
    heads = c.num_attention_heads // mesh.size(mesh.model_axes)
    shape = (*work.hidden.shape[:2], heads)
    query = jnp.broadcast_to(work.hidden[..., :1, None], (*shape, c.kv_lora_rank))
    rotary = jnp.zeros((*shape, c.qk_rope_head_dim), query.dtype)
    for i in layers:
        query = attend(
            query,
            rotary,
            state.cache.latent[i],
            step.own_lengths,
            step.ancestors,
            scale=c.qk_head_dim**-0.5,
            backend=runtime.backend,
            shared=step.plan,
        )
    return state, dataclasses.replace(work, hidden=touch(work.hidden, query))


def experts(
    layers: tuple[int, ...], program: loop.Program, params: Params, state: DecodeState, work: Work
) -> tuple[DecodeState, Work]:
    """Norm, router and routed experts of MoE layers."""
    blocks, x = _blocks(program, params, state, work)[0], work.hidden.reshape(-1, work.hidden.shape[-1])
    for i in layers:
        x, _ = blocks[i].mlp.routed(blocks[i].post_attention_layernorm(x))
    return state, dataclasses.replace(work, hidden=x.reshape(work.hidden.shape))


def mlp(
    layers: tuple[int, ...], program: loop.Program, params: Params, state: DecodeState, work: Work
) -> tuple[DecodeState, Work]:
    """Norm and shared experts of MoE layers, norm and MLP of dense ones."""
    blocks, x = _blocks(program, params, state, work)[0], work.hidden
    for i in layers:
        part = blocks[i].mlp
        part = part.shared_experts if isinstance(part, MoE) else part
        assert part is not None  # without shared experts there is nothing to measure
        x = x + part(blocks[i].post_attention_layernorm(x))
    return state, dataclasses.replace(work, hidden=x)


def lm_head(program: loop.Program, params: Params, state: DecodeState, work: Work) -> tuple[DecodeState, Work]:
    logits = k2.logits(params.target, program.model, work.hidden, program.runtime)
    return state, dataclasses.replace(work, hidden=touch(work.hidden, logits), logits=logits)


def exchanges(
    run: bool, program: loop.Program, params: Params, state: DecodeState, work: Work
) -> tuple[DecodeState, Work]:
    """The all-reduces of a verify forward, one after the other; without `run`, what stands between them alone."""
    c, mesh, x = program.model, program.runtime.mesh, work.hidden
    sums = [mesh.model_axes]  # of the embedding
    for layer in range(c.num_hidden_layers):
        sums += [mesh.model_axes, mesh.all_axes if c.is_moe(layer) else mesh.model_axes]
    for axes in filter(None, sums):
        # Parts that differ by device: XLA knows the sum of equal ones. They make x again, so that it stays finite.
        parts = parallel.parts(axes)
        part = jnp.where(parallel.index(axes) == 0, (parts + 1) / (2 * parts), 1 / (2 * parts))
        x = lax.optimization_barrier(x * part.astype(x.dtype))
        if run:
            x = parallel.total(x, axes)
    return state, dataclasses.replace(work, hidden=x)


def _blocks(program: loop.Program, params: Params, state: DecodeState, work: Work) -> tuple[Any, Any]:
    """The layers, and what they share."""
    model = k2.modules(params.target, program.model, program.runtime)
    ancestors = work.tree.ancestors if program.budget else None
    positions = work.tree.positions(state.cache.lengths)
    return model.layers, k2.shared_step(program.model, positions, state.cache, ancestors, program.runtime)


@functools.partial(jax.jit, static_argnames=("program", "stage"), donate_argnames=("state", "work"))
def repeat(
    program: loop.Program, stage: Stage, params: Params, state: DecodeState, work: Work, times: jax.Array
) -> tuple[DecodeState, Work]:
    """`stage`, `times` times, one after the other."""

    def on_device(params: Params, state: DecodeState, work: Work, times: jax.Array) -> tuple[DecodeState, Work]:
        def once(_: Any, carry: tuple[DecodeState, Work]) -> tuple[DecodeState, Work]:
            return stage(program, params, *carry)

        return lax.fori_loop(0, times, once, (state, work))

    if program.mesh is None:
        return on_device(params, state, work, times)
    specs = program.state_specs(state), work_specs(program)
    return jax.shard_map(
        on_device,
        mesh=program.mesh,
        in_specs=(program.param_specs(params), *specs, PartitionSpec()),
        out_specs=specs,
        check_vma=False,
    )(params, state, work, times)


def work_specs(program: loop.Program) -> Work:
    """A tree prefix: the PartitionSpecs of the fields of `Work`."""
    whole, vocabulary = PartitionSpec(), PartitionSpec(None, None, program.vocabulary_axes or None)
    specs = {field.name: whole for field in dataclasses.fields(Work)}
    return Work(**(specs | {"logits": vocabulary, "draft_logits": vocabulary}))


def make_work(program: loop.Program, streams: int, key: jax.Array) -> Work:
    """Random logits and hidden states, and the trees of these logits; arrays are whole for the devices at hand."""
    c, drafting, rows = program.model, program.drafting, program.budget + 1
    axes = program.vocabulary_axes
    vocab = c.vocab_size // program.runtime.mesh.size(axes) * program.cuts.size(axes)
    keys = jax.random.split(key, 4)

    def normal(key: jax.Array, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.normal(key, (streams, *shape), dtype)

    roots = jnp.arange(1, streams + 1, dtype=jnp.int32)
    drafted = None if drafting is None else 4 * normal(keys[0], program.depth, vocab)
    if drafted is None:
        tree = ddtree.root_only(roots)
    else:
        tree = ddtree.build(drafted, roots, program.budget)
    moe = sum(c.is_moe(layer) for layer in range(c.num_hidden_layers))
    dtype = program.runtime.dtype
    posterior = jnp.zeros((streams, rows), jnp.int32)
    return Work(
        tree=tree,
        hidden=normal(keys[1], rows, c.hidden_size, dtype=dtype),
        logits=normal(keys[2], rows, vocab),
        posterior=posterior,
        accepted=ddtree.accept(tree, posterior, program.depth),
        draft_logits=drafted,
        taps=None if drafting is None else normal(keys[3], rows, len(program.taps) * c.hidden_size, dtype=dtype),
        routing=jnp.zeros((moe, streams, rows, c.num_experts_per_tok), jnp.int32) if moe else None,
    )
