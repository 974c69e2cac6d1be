"""One segment of prefill attention in Pallas Triton: a program per head and tile of tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.prefill_attention.config import Config
from pallas_kernels.prefill_attention.state import State
from pallas_kernels.tiles import LOG2_E, UNSEEN, dot, exp2, load, tile


def attend(
    q_nope: Float[Array, "slots q heads nope"],
    q_rope: Float[Array, "slots q heads rope"],
    expanded: Float[Array, "slots heads segment nope_and_v"],
    k_rope: Float[Array, "slots segment rope"],
    last: Int32[Array, "slots q"],
    state: State,
    *,
    scale: float,
    config: Config,
    interpret: bool,
) -> State:
    """`state` with the keys of the segment added; token i of slot s sees those at or below last[s, i].

    `last` rises with i, and `segment` is a multiple of the block.
    """
    slots, q, heads, _ = q_nope.shape
    outputs = pl.pallas_call(
        functools.partial(_attend, config=config, scale=scale * LOG2_E, interpret=interpret),
        # the last tiles, which see most, start first
        grid=(heads, pl.cdiv(q, config.tokens), slots),
        out_shape=[jax.ShapeDtypeStruct(s.shape, s.dtype) for s in state],
        input_output_aliases={5 + i: i for i in range(len(state))},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="prefill_attention",
    )(q_nope, q_rope, expanded, k_rope, last, *state)
    return State(*outputs)


def _attend(q_nope, q_rope, expanded, k_rope, last, acc_in, peak_in, total_in, acc_ref, peak_ref, total_ref, **static):
    config, scale, interpret = static["config"], static["scale"], static["interpret"]
    _, q, _, nope = q_nope.shape
    segment, rope, v, block = k_rope.shape[1], q_rope.shape[3], acc_ref.shape[3], config.block
    head, slot = pl.program_id(0), pl.program_id(2)
    token_tile = pl.num_programs(1) - 1 - pl.program_id(1)
    token = token_tile * config.tokens + jnp.arange(config.tokens, dtype=jnp.int32)
    live = token < q
    held = jnp.minimum(token, q - 1)
    lowest, highest = (last[slot, jnp.minimum(token_tile * config.tokens + t, q - 1)] for t in (0, config.tokens - 1))
    end = (jnp.clip(highest + 1, 0, segment) + block - 1) // block
    unmasked = jnp.clip(lowest + 1, 0, segment) // block

    # the state is updated in place: where the segment holds nothing for this tile, it stays
    @pl.when(end > 0)
    def _():
        column = jnp.arange(tile(v), dtype=jnp.int32)
        inside = live[:, None] & (column < v)[None, :]
        limit = plgpu.load(last.at[slot, held])
        qn, qr = load(q_nope, (slot,), held, (head,), 0, nope), load(q_rope, (slot,), held, (head,), 0, rope)

        def step(i, carry, masked):
            acc, peak, total = carry
            j = i * block + jnp.arange(block, dtype=jnp.int32)
            keys, values = (load(expanded, (slot, head), j, (), start, size) for start, size in ((0, nope), (nope, v)))
            scores = (dot(qn, keys.T) + dot(qr, load(k_rope, (slot,), j, (), 0, rope).T)) * scale
            if masked:
                scores = jnp.where(j[None, :] <= limit[:, None], scores, UNSEEN)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
            keep = exp2(peak - new_peak, interpret)
            weight = exp2(scores - new_peak[:, None], interpret)
            total = total * keep + jnp.sum(weight, axis=1)
            return acc * keep[:, None] + dot(weight.astype(values.dtype), values), new_peak, total

        carry = (
            plgpu.load(acc_in.at[slot, held[:, None], head, column[None, :]], mask=inside, other=0.0),
            plgpu.load(peak_in.at[slot, held, head]),
            plgpu.load(total_in.at[slot, held, head]),
        )
        carry = lax.fori_loop(0, unmasked, functools.partial(step, masked=False), carry)
        acc, peak, total = lax.fori_loop(unmasked, end, functools.partial(step, masked=True), carry)
        plgpu.store(acc_ref.at[slot, token[:, None], head, column[None, :]], acc, mask=inside)
        plgpu.store(peak_ref.at[slot, token, head], peak, mask=live)
        plgpu.store(total_ref.at[slot, token, head], total, mask=live)
