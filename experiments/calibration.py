"""Whether the drafter's probabilities are those with which the target accepts its drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments import rounds
from experiments.decoding import Config as Config
from experiments.decoding import inputs as inputs
from kdjax.evaluate import workbench
from kdjax.run import plot
from kdjax.run.experiment import Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import Metric

CLAIM = (
    "DDTree (arXiv 2604.12989), section 3, and CaDDTree (arXiv 2606.01813): the expected accepted length is the sum of "
    "the path probabilities of the tree, were the drafter's marginals calibrated and independent"
)
METRICS = {
    "expected_tau": Metric(
        total="expected",
        per="rounds",
        definition="tokens a round promises by the drafter's probabilities, bonus included",
    ),
    "measured_tau": Metric(
        total="accepted", per="rounds", definition="tokens a round gets, bonus included, before any cut by a stop"
    ),
    "optimism": Metric(total="expected", per="accepted", definition="expected over measured; 1 is calibrated"),
    "brier": Metric(
        total="squared_error",
        per="drafts",
        definition="mean squared error of the marginal probability of drafts whose parent was accepted; 0 is perfect",
    ),
}
BINS = 10


def measure(config: Config) -> Iterator[Record]:
    """A draft counts where its parent was accepted: its marginal is the probability with which it should be."""
    models = workbench.pair(config.model, config.runtime)
    requests = workbench.requests(config.prompts, models.tokenizer)
    context = workbench.context_for(list(requests.values()))
    decoder = workbench.decoder(config.model, config.runtime, config.decode, 1, context)
    for name, request in requests.items():
        counts = np.zeros((models.depth, BINS, 3))  # drafts, sum of probabilities, accepted
        expected = accepted = squared_error = passes = 0.0
        for _, seen in rounds.observe(decoder, [request]):
            n = int(seen.n_valid[0])
            scores, on_path = seen.scores[0, :n].astype(np.float64), seen.on_path[0, :n]
            passes += 1
            expected += np.exp(scores).sum()
            accepted += on_path.sum()
            parents = seen.parents[0, 1:n]
            tried = on_path[parents]
            p = np.minimum(np.exp(scores[1:] - scores[parents]), 1.0)[tried]
            hit = on_path[1:][tried]
            squared_error += ((p - hit) ** 2).sum()
            place = seen.depths[0, 1:n][tried] - 1, np.minimum((p * BINS).astype(int), BINS - 1)
            for column, values in enumerate((np.ones_like(p), p, hit)):
                np.add.at(counts[..., column], place, values)
        yield {
            "unit": name,
            "rounds": int(passes),
            "expected": float(expected),
            "accepted": float(accepted),
            "squared_error": float(squared_error),
            "drafts": float(counts[..., 0].sum()),
            "bins": counts.tolist(),
        }


def conclude(results: Sequence[Result]) -> list[str]:
    findings = []
    for result in results:
        optimism, bins = result.estimates["optimism"], _bins(result)
        bounds = "" if optimism.low is None else f" (95 %: {optimism.low:.2f} to {optimism.high:.2f})"
        findings.append(
            f"{result.name}: the drafter promises {result.value('expected_tau'):.2f} tokens per round and gets "
            f"{result.value('measured_tau'):.2f}, {optimism.value:.2f} times as many{bounds}; its marginals are off by "
            f"{calibration_error(bins.sum(0)):.1%} on average"
        )
        promised, got = bins[..., 1].sum(1), bins[..., 2].sum(1)
        depths = [d for d in range(len(bins)) if got[d]]
        if len(depths) > 1:
            first, last = depths[0], depths[-1]
            findings.append(
                f"{result.name}: of what it promises at depth {first + 1} the drafter gets "
                f"{got[first] / promised[first]:.0%}, at depth {last + 1} {got[last] / promised[last]:.0%}"
            )
    return findings


def draw(results: Sequence[Result], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], color="grey", linewidth=1)
    right.axhline(1, color="grey", linewidth=1)
    for i, result in enumerate(results):
        bins = _bins(result)
        color, marker, dashes = plot.STYLES[i % len(plot.STYLES)]
        style = {"color": color, "marker": marker, "linestyle": dashes, "label": result.name}
        drafts, promised, got = bins.sum(0).T
        used = drafts > 0
        left.plot(promised[used] / drafts[used], got[used] / drafts[used], **style)
        _, promised, got = bins.sum(1).T
        right.plot(np.arange(1, len(bins) + 1)[promised > 0], (got[promised > 0] / promised[promised > 0]), **style)
    left.set(xlabel="the drafter's probability", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
    right.set(xlabel="depth", ylabel="accepted over promised", ylim=(0, None))
    right.set_xticks(range(1, len(_bins(results[0])) + 1))
    left.legend(fontsize=8)


def calibration_error(bins: np.ndarray) -> float:
    """Expected calibration error of [bins, (drafts, sum of probabilities, accepted)]."""
    drafts, promised, got = bins.T
    return float(np.abs(promised - got).sum() / max(drafts.sum(), 1))


def _bins(result: Result) -> np.ndarray:
    """[depth, bins, 3], of all prompts."""
    return np.sum([record["bins"] for record in result.records], axis=0)
