"""Ways to decide what to verify: a chain, a static tree, DDTree of a fixed budget, and budgets by measured cost."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from experiments import decoding
from experiments.decoding import decode_all
from experiments.rounds import batches
from experiments.static_tree import StaticRanks, Table, acceptance_by_rank
from kdjax.config.decode import AtLeast1, DecodeConfig
from kdjax.decode import CostAware, Decoder, Request
from kdjax.errors import KdjaxError
from kdjax.evaluate import workbench
from kdjax.run import plot
from kdjax.run.experiment import Inputs, Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import Difference, difference

CLAIM = "CaDDTree (arXiv 2606.01813): a budget by cost matches or beats DDTree with the best fixed budget"
METRICS = decoding.SPEED | decoding.TAU
Policy = Literal["fixed", "static", "stream", "batch"]
RANKS = 8
WITHIN = 0.02
COST_TURNS = 4


class Config(decoding.Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`policy` fixed decodes as `decode` says: a chain, a tree, or plainly.

    "static" keeps one shape of tree, made of how often each rank was accepted on the prompts of `calibrate`. "stream"
    and "batch" verify the number of nodes among `widths` that promises the most tokens per second, by `seconds` per
    round at each of them. Without `seconds` these are measured on the prompts of `calibrate`, and `widths` end with the
    fixed budget that was fastest there: to draft and weigh more costs time in every round. Where choosing in every
    round makes those prompts slower than that budget alone, the policy keeps to it. Their cells run the fixed budgets
    once more in turns with the policy: cells that run one after another meet another load of the machine.
    """

    policy: Policy = "fixed"
    widths: tuple[AtLeast1, ...] = (1, 3, 7, 15, 31)
    seconds: tuple[float, ...] = ()
    calibrate: workbench.PromptsSection = workbench.PromptsSection(skip=14, new_tokens=64)


def inputs(config: Config) -> Inputs:
    if config.policy != "fixed":
        decoding.inputs(_same(config))  # refuses widths that no decoder accepts
    return decoding.inputs(config)


def measure(config: Config) -> Iterator[Record]:
    tokenizer = workbench.pair(config.model, config.runtime).tokenizer
    requests = workbench.requests(config.prompts, tokenizer)
    if config.policy in ("fixed", "static"):
        yield from decoding.records(_decoder(config), requests, config.repeats)
        return
    widths, seconds = (config.widths, config.seconds) if config.seconds else costs(_same(config))
    tried = None if config.seconds or len(widths) == 1 else gain(_same(config), config.policy)
    keeps = len(widths) == 1 or (tried is not None and tried < 1)
    yield {
        "unit": "cost table",
        "widths": list(widths),
        "timings": {"seconds": list(seconds), "gain": tried, "keeps": widths[-1] if keeps else None},
    }
    decoders = [_fixed(config, _tree(config, width)) for width in config.widths]
    decoders += [] if keeps else [_aware(config, widths, seconds)]
    turns = [[decode_all(d, list(requests.values())) for d in decoders] for _ in range(config.repeats)]
    by_decoder = [[turn[i] for turn in turns] for i in range(len(decoders))]
    chosen = by_decoder[config.widths.index(widths[-1]) if keeps else -1]
    yield from decoding.records_of(chosen, list(requests), config.slots)
    for width, outcomes in zip(config.widths, by_decoder, strict=False):
        for record in decoding.records_of(outcomes, list(requests), config.slots):
            if "timed_tokens" in record:
                timings = {"fixed_s": record["timings"]["decode_s"]}
                yield {"unit": record["unit"], "fixed": width, "tokens": record["timed_tokens"], "timings": timings}


def _decoder(config: Config) -> Decoder:
    if config.policy == "fixed":
        return _fixed(config, config.decode)
    models = workbench.pair(config.model, config.runtime)
    ranks = acceptance(_same(config))
    drafting = StaticRanks(models.drafter.config, models.target.config, models.runtime, ranks)
    return _special(config, config.decode, drafting=drafting)


def _aware(config: Config, widths: tuple[int, ...], seconds: tuple[float, ...]) -> Decoder:
    assert config.policy in ("stream", "batch")
    return _special(config, _tree(config, widths[-1]), policy=CostAware(widths, seconds, config.policy))


def _special(config: Config, decode: DecodeConfig, **options: Any) -> Decoder:
    models = workbench.pair(config.model, config.runtime)
    return Decoder(
        models.target,
        models.drafter,
        decode,
        models.runtime,
        slots=config.slots,
        context=_context(config),
        **options,
    )


@functools.lru_cache(maxsize=8)
def costs(config: Config) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Widths up to the fastest fixed budget, and seconds per round at each with all slots running.

    The widths take turns, and the fastest turn of each counts.
    """
    groups = batches(_calibration(config), config.slots)
    if not groups:
        raise KdjaxError(f"calibrate has fewer prompts than slots = {config.slots}: give at least as many")
    decoders = [_fixed(config, _tree(config, width)) for width in config.widths]
    turns = [[_seconds(decoder, groups) for decoder in decoders] for _ in range(COST_TURNS)]
    per_round, per_token = (np.min(turns, axis=0)[:, i] for i in range(2))
    most = 1 + int(np.argmin(per_token))
    return config.widths[:most], tuple(per_round[:most].tolist())


@functools.lru_cache(maxsize=8)
def gain(config: Config, policy: Literal["stream", "batch"]) -> float:
    """How many times the tokens per second of the fastest fixed budget the policy has, on the prompts of `calibrate`.

    The two take turns, and the fastest turn of each counts.
    """
    widths, seconds = costs(config)
    groups = batches(_calibration(config), config.slots)
    aware = _aware(msgspec.structs.replace(config, policy=policy), widths, seconds)
    decoders = [aware, _fixed(config, _tree(config, widths[-1]))]
    turns = [[_seconds(decoder, groups)[1] for decoder in decoders] for _ in range(COST_TURNS)]
    with_choice, without = np.min(turns, axis=0)
    return float(without / with_choice)


def _seconds(decoder: Decoder, groups: Sequence[Sequence[Request]]) -> tuple[float, float]:
    """Per round and per token, one group of prompts after the other."""
    outcomes = [decode_all(decoder, group) for group in groups]
    seconds = sum(outcome.decode_seconds for outcome in outcomes)
    rounds = sum(max(c.statistics.rounds for c in outcome.begun) for outcome in outcomes)
    return seconds / rounds, seconds / sum(outcome.statistics.emitted for outcome in outcomes)


@functools.lru_cache(maxsize=8)
def acceptance(config: Config) -> Table:
    models = workbench.pair(config.model, config.runtime)
    decode = _tree(config, config.widths[-1])
    decoder = workbench.decoder(config.model, config.runtime, decode, 1, _context(config))
    return acceptance_by_rank(decoder, _calibration(config), models.depth, min(RANKS, config.widths[-1]))


def _same(config: Config) -> Config:
    """What the calibration depends on, so that all policies share it."""
    decode = msgspec.structs.replace(config.decode, mode="tree", budget=config.widths[-1])
    return msgspec.structs.replace(config, policy="fixed", decode=decode)


def _tree(config: Config, width: int) -> DecodeConfig:
    return msgspec.structs.replace(config.decode, mode="tree", budget=width)


def _fixed(config: Config, decode: DecodeConfig) -> Decoder:
    return workbench.decoder(config.model, config.runtime, decode, config.slots, _context(config))


def _calibration(config: Config) -> list[Request]:
    tokenizer = workbench.pair(config.model, config.runtime).tokenizer
    return list(workbench.requests(config.calibrate, tokenizer).values())


def _context(config: Config) -> int:
    """Of all prompts, so that both kinds run in the same program."""
    tokenizer = workbench.pair(config.model, config.runtime).tokenizer
    return workbench.context_for([*workbench.requests(config.prompts, tokenizer).values(), *_calibration(config)])


def conclude(results: Sequence[Result]) -> list[str]:
    findings = []
    for slots in sorted({r.config.slots for r in results}):
        here = [r for r in results if r.config.slots == slots]
        findings += [f"C={slots}: {said}" for said in [*_against_fixed(here), *_against_trees(here)]]
    return [*findings, decoding.same_tokens(results), decoding.loops(results)]


def _against_fixed(here: Sequence[Result]) -> Iterator[str]:
    """The cost-aware policies against the fixed budgets that ran in turns with them, and the table they used."""
    for result in (r for r in here if r.config.policy in ("stream", "batch")):
        fixed: dict[int, Difference] = {}
        for width in result.config.widths:
            gain = difference(METRICS["tokens_per_s"], _in_turns(result, width), result.records)
            assert gain is not None and gain.change is not None
            fixed[width] = gain
        best, worst = (choice(fixed, key=lambda width: fixed[width].a) for choice in (max, min))
        gain = fixed[best]
        bounds = [f"{bound / gain.a:+.1%}" for bound in (gain.low, gain.high) if bound is not None]
        interval = f" [{', '.join(bounds)}]" if bounds else ""
        verdict = f"within the {WITHIN:.0%} allowed"
        if gain.b < (1 - WITHIN) * gain.a:
            noise = gain.high is not None and gain.high >= -WITHIN * gain.a
            verdict = f"outside the {WITHIN:.0%} allowed" + (" by no more than the noise" if noise else "")
        yield (
            f"cost-aware per {result.config.policy} runs {gain.b / gain.a - 1:+.1%}{interval} against the best fixed "
            f"budget ({best} nodes), {verdict}, and {gain.b / fixed[worst].a:.2f} times the worst ({worst} nodes)"
        )
        table = next(r for r in result.records if r["unit"] == "cost table")
        timings = table["timings"]
        costs = zip(table["widths"], timings["seconds"], strict=True)
        yield "milliseconds per round by nodes: " + ", ".join(f"{w}: {1e3 * s:.2f}" for w, s in costs)
        if timings["gain"] is not None:
            kept = "" if timings["keeps"] is None else f", so it keeps to {timings['keeps']} nodes"
            yield (
                f"choosing per {result.config.policy} in every round had {timings['gain']:.2f} times the speed of "
                f"{table['widths'][-1]} nodes on the prompts of the calibration{kept}"
            )


def _in_turns(result: Result, width: int) -> list[Record]:
    """The times of a fixed budget, as records of their own cell would have them."""
    return [
        {"unit": r["unit"], "timed_tokens": r["tokens"], "timings": {"decode_s": r["timings"]["fixed_s"]}}
        for r in result.records
        if r.get("fixed") == width
    ]


def _against_trees(here: Sequence[Result]) -> Iterator[str]:
    """The static tree and the chain against the tree of as many nodes."""
    trees = [r for r in here if r.config.policy == "fixed" and r.config.decode.mode == "tree"]
    for other in (r for r in here if r.config.policy == "static" or r.config.decode.mode == "chain"):
        for tree in (t for t in trees if t.config.decode.budget == other.config.decode.budget):
            loss = difference(METRICS["tau_micro"], other.records, tree.records)
            assert loss is not None
            bounds = "" if loss.low is None else f" (95 %: {loss.low:+.2f} to {loss.high:+.2f})"
            name = "the static tree" if other.config.policy == "static" else "the chain"
            yield (
                f"DDTree takes {loss.difference:+.2f} tokens per pass{bounds} against {name} of as many nodes "
                f"({loss.a:.2f}, {tree.config.decode.budget} nodes)"
            )


def draw(results: Sequence[Result], figure: Any) -> None:
    slots = sorted({r.config.slots for r in results})
    panels = figure.subplots(1, len(slots), squeeze=False)[0]
    for axes, count in zip(panels, slots, strict=True):
        here = [r for r in results if r.config.slots == count]
        plot.bars(axes, [_label(r) for r in here], [r.estimates["tokens_per_s"] for r in here])
        axes.set(title=f"C = {count}", xlabel="tok/s")


def _label(result: Result) -> str:
    decode = result.config.decode
    if result.config.policy in ("stream", "batch"):
        return f"cost-aware, {result.config.policy}"
    if result.config.policy == "static":
        return f"static {decode.budget}"
    return f"{decode.mode} {decode.budget}" if decode.budget else "plain"
