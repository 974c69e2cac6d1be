"""The drafter's weights in bf16 and rounded to INT4: what acceptance the smaller weights cost."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from experiments import decoding
from experiments.decoding import inputs as inputs
from kdjax import drafter as dflash
from kdjax.bundled.locate import locate
from kdjax.checkpoint import Drafter, load_drafter
from kdjax.checkpoint.int4 import encode
from kdjax.config.decode import AtLeast1, DecodeConfig
from kdjax.config.generate import ModelSection, RuntimeSection
from kdjax.evaluate import workbench
from kdjax.model.int4 import dequantize
from kdjax.model.runtime import runtime_of
from kdjax.run import plot
from kdjax.run.experiment import Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import difference

CLAIM = "DDTree (arXiv 2604.12989), section 3: the drafter decides how fast the text comes, never which text"
METRICS = decoding.TAU
Precision = Literal["bf16", "int4"]


class Config(decoding.Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`drafter_weights` int4 rounds every matrix of the drafter, one scale per `group_size` input columns.

    The rounded weights are expanded again: acceptance is that of INT4, speed is not.
    """

    drafter_weights: Precision = "bf16"
    group_size: AtLeast1 = 32


def measure(config: Config) -> Iterator[Record]:
    tokenizer = workbench.pair(config.model, config.runtime).tokenizer
    requests = workbench.requests(config.prompts, tokenizer)
    context = workbench.context_for(list(requests.values()))
    decoder = workbench.decoder(config.model, config.runtime, config.decode, config.slots, context)
    drafter = decoder.params.drafter
    if config.drafter_weights == "int4":
        drafter = rounded(config.model, config.runtime, config.group_size).params
    before, decoder.params = decoder.params, decoder.params._replace(drafter=drafter)
    try:
        yield from decoding.records(decoder, requests, config.repeats)
    finally:
        decoder.params = before


@functools.lru_cache(maxsize=2)
def rounded(model: ModelSection, runtime: RuntimeSection, group_size: int) -> Drafter:
    """The drafter with every matrix rounded to INT4 as compressed-tensors does it. Norms stay.

    Raises KdjaxError where a matrix cannot be cut into groups of that size.
    """
    _, folder = locate(model, needs_drafter=True)
    assert folder is not None
    numerics = runtime_of(runtime)
    as_stored = msgspec.structs.replace(numerics, layout="checkpoint")
    target = workbench.pair(model, runtime).target.config
    drafter = load_drafter(folder, as_stored, target)

    def through_int4(weight: jax.Array) -> jax.Array:
        if weight.ndim < 2:
            return weight
        stored = np.asarray(weight.astype(jnp.bfloat16))
        return dequantize(encode(stored, group_size, "max/7.5"), weight.dtype)

    return Drafter(drafter.config, dflash.arrange(jax.tree.map(through_int4, drafter.params), numerics))


def conclude(results: Sequence[Result]) -> list[str]:
    findings = []
    for full, small in _pairs(results):
        cost = difference(METRICS["tau_micro"], full.records, small.records)
        assert cost is not None
        bounds = "" if cost.low is None else f" (95 %: {cost.low:+.2f} to {cost.high:+.2f})"
        verdict = "a difference" if cost.is_significant else "no difference that these prompts can tell"
        decode = small.config.decode
        findings.append(
            f"{decode.mode} {decode.budget}: tau is {cost.a:.2f} with bf16 and {cost.b:.2f} with INT4 in groups of "
            f"{small.config.group_size}, {cost.difference:+.2f}{bounds}: {verdict}"
        )
    return [*findings, decoding.same_tokens(results), decoding.loops(results)]


def draw(results: Sequence[Result], figure: Any) -> None:
    plot.bars(figure.subplots(), [r.name for r in results], [r.estimates["tau_micro"] for r in results])
    figure.axes[0].set(xlabel="tokens per verify pass")


def _pairs(results: Sequence[Result]) -> list[tuple[Result, Result]]:
    full = {_key(r.config.decode): r for r in results if r.config.drafter_weights == "bf16"}
    return [
        (full[key], r) for r in results if r.config.drafter_weights == "int4" and (key := _key(r.config.decode)) in full
    ]


def _key(decode: DecodeConfig) -> tuple[Any, ...]:
    return decode.mode, decode.budget, decode.temperature
