"""How many experts a verify batch uses: its tokens are neighbours, and neighbours choose alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments import rounds
from experiments.decoding import Config as Config
from experiments.decoding import inputs as inputs
from kdjax.errors import KdjaxError
from kdjax.evaluate import workbench
from kdjax.run import plot
from kdjax.run.experiment import Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import Metric

CLAIM = (
    "CaDDTree (arXiv 2606.01813) takes the cost of verifying as convex in the nodes; the weights that a mixture of "
    "experts reads grow concavely, and slower than independent routing says"
)
METRICS = {
    "distinct": Metric(total="distinct", per="passes", definition="experts in use per MoE layer and verify pass"),
    "independent": Metric(
        total="independent",
        per="passes",
        definition="the same, were each token's experts drawn independently and uniformly: E (1 - (1 - k/E)^tokens)",
    ),
    "reuse": Metric(total="distinct", per="independent", definition="distinct over independent"),
    "tokens": Metric(total="tokens", per="passes", definition="tokens per verify pass, padding left out"),
}


def measure(config: Config) -> Iterator[Record]:
    """`slots` prompts are verified in one batch; a unit is a group of prompts."""
    models = workbench.pair(config.model, config.runtime)
    requests = list(workbench.requests(config.prompts, models.tokenizer).values())
    groups = rounds.batches(requests, config.slots)
    if not groups:
        raise KdjaxError(f"slots = {config.slots} exceeds the {len(requests)} prompts: lower it or add prompts")
    experts, top_k = models.target.config.n_routed_experts, models.target.config.num_experts_per_tok
    context = workbench.context_for(requests)
    decoder = workbench.decoder(config.model, config.runtime, config.decode, config.slots, context)
    for i, group in enumerate(groups):
        distinct: list[list[int]] = []
        tokens: list[int] = []
        for running, seen in rounds.observe(decoder, group):
            if len(running) < config.slots:  # the batch is no longer the one that is asked about
                break
            valid = np.arange(seen.tokens.shape[1])[None, :] < seen.n_valid[:, None]
            distinct.append([len(np.unique(layer[valid])) for layer in seen.routing])
            tokens.append(int(valid.sum()))
        by_layer = np.array(distinct, float).reshape(len(tokens), -1)
        alone = experts * (1 - (1 - top_k / experts) ** np.array(tokens))
        layers = by_layer.shape[1]
        yield {
            "unit": f"group {i}",
            "passes": by_layer.size,
            "distinct": float(by_layer.sum()),
            "independent": float(alone.sum() * layers),
            "tokens": float(sum(tokens) * layers),
            "by_layer": by_layer.mean(0).tolist(),
            "experts": experts,
            "top_k": top_k,
        }


def conclude(results: Sequence[Result]) -> list[str]:
    findings = []
    ordered = sorted(results, key=lambda r: r.value("tokens"))
    experts, top_k = (ordered[0].records[0][key] for key in ("experts", "top_k"))
    for result in ordered:
        reuse = result.estimates["reuse"]
        bounds = "" if reuse.low is None else f" (95 %: {reuse.low:.2f} to {reuse.high:.2f})"
        findings.append(
            f"{result.name}: {result.value('tokens'):.1f} tokens use {result.value('distinct'):.1f} of {experts} "
            f"experts, {reuse.value:.2f} times the estimate{bounds}"
        )
    first, last = ordered[0], ordered[-1]
    if last.value("tokens") > first.value("tokens"):
        start = first.value("distinct") / first.value("tokens")
        end = (last.value("distinct") - first.value("distinct")) / (last.value("tokens") - first.value("tokens"))
        findings.append(
            f"a token brings {start:.2f} experts with {first.value('tokens'):.1f} tokens and {end:.2f} from there to "
            f"{last.value('tokens'):.1f} tokens, of the {top_k} that it asks for: the traffic is "
            f"{'concave' if end < start else 'not concave'}"
        )
    return findings


def draw(results: Sequence[Result], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    ordered = sorted(results, key=lambda r: r.value("tokens"))
    all_tokens = [r.value("tokens") for r in ordered]
    plot.line(left, all_tokens, [r.estimates["independent"] for r in ordered], 4, "independent routing")
    for i, slots in enumerate(sorted({r.config.slots for r in ordered})):
        many = [r for r in ordered if r.config.slots == slots]
        tokens = [r.value("tokens") for r in many]
        plot.line(left, tokens, [r.estimates["distinct"] for r in many], i, f"measured, C={slots}")
        plot.line(right, tokens, [r.estimates["reuse"] for r in many], i, f"C={slots}")
    experts = ordered[0].records[0]["experts"]
    left.axhline(experts, color="grey", linewidth=1)
    left.set(xlabel="tokens per verify pass", ylabel="distinct experts per layer", ylim=(0, 1.05 * experts))
    right.set(xlabel="tokens per verify pass", ylabel="distinct over independent", ylim=(0, 1.05))
    for axes in (left, right):
        plot.log_x(axes, [round(t) for t in all_tokens])
    left.legend(fontsize=8, loc="lower right")
