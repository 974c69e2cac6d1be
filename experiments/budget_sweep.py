"""Tau and speed by the number of tree nodes, beside the chain and plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import decoding
from experiments.decoding import Config as Config
from experiments.decoding import inputs as inputs
from experiments.decoding import measure as measure
from kdjax.run import plot
from kdjax.run.experiment import Result
from kdjax.run.statistics import difference

CLAIM = "DDTree (arXiv 2604.12989), figure 3: tau keeps growing with the budget, the speed-up peaks and falls"
METRICS = decoding.TAU | decoding.SPEED


def conclude(results: Sequence[Result]) -> list[str]:
    trees = _trees(results)
    plain = [r for r in results if r.config.decode.mode == "autoregressive" or not r.config.decode.budget]
    findings = []
    if len(trees) > 1:
        first, last = trees[0], trees[-1]
        gained = last.value("tau_micro") - first.value("tau_micro")
        findings.append(
            f"tau grows from {first.value('tau_micro'):.2f} with {first.config.decode.budget} nodes to "
            f"{last.value('tau_micro'):.2f} with {last.config.decode.budget}"
            if gained > 0
            else f"tau does not grow from {first.config.decode.budget} to {last.config.decode.budget} nodes on these "
            f"{len(first.records)} prompts"
        )
        middle = trees[len(trees) // 2]
        if gained > 0 and middle is not last:
            share = (middle.value("tau_micro") - first.value("tau_micro")) / gained
            findings.append(f"{share:.0%} of that growth is there with {middle.config.decode.budget} nodes")
    for chain in (r for r in results if r.config.decode.mode == "chain"):
        for tree in (t for t in trees if t.config.decode.budget == chain.config.decode.budget):
            gain = difference(METRICS["tau_micro"], chain.records, tree.records)
            assert gain is not None
            bounds = "" if gain.low is None else f" (95 %: {gain.low:+.2f} to {gain.high:+.2f})"
            findings.append(
                f"with {tree.config.decode.budget} nodes the tree takes {gain.difference:+.2f} tokens per pass "
                f"more than the chain{bounds}"
            )
    fastest = max(results, key=lambda r: r.value("tokens_per_s"))
    findings.append(f"the fastest cell is {fastest.name} with {fastest.value('tokens_per_s'):.0f} tok/s")
    if plain and fastest is not plain[0]:
        ratio = fastest.value("tokens_per_s") / plain[0].value("tokens_per_s")
        findings[-1] += f", {ratio:.2f} times plain decoding"
    return [*findings, decoding.same_tokens(results), decoding.loops(results)]


def draw(results: Sequence[Result], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    trees = _trees(results)
    budgets = [t.config.decode.budget for t in trees]
    for axes, metric, label in ((left, "tau_micro", "tokens per verify pass"), (right, "tokens_per_s", "tok/s")):
        plot.line(axes, budgets, [t.estimates[metric] for t in trees], 0, "tree")
        for style, other in enumerate((r for r in results if r not in trees), 1):
            color, _, dashes = plot.STYLES[style]
            axes.axhline(other.value(metric), color=color, linestyle=dashes, label=other.name)
        axes.set(xlabel="tree nodes, root not counted", ylabel=label, ylim=(0, None))
        plot.log_x(axes, budgets)
    left.legend()


def _trees(results: Sequence[Result]) -> list[Result]:
    trees = [r for r in results if r.config.decode.mode == "tree" and r.config.decode.budget]
    return sorted(trees, key=lambda r: r.config.decode.budget)
