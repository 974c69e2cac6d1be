"""Perplexity of texts by rolling windows: per byte and per word, which compares between tokenizers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kdjax.bundled.locate import locate
from kdjax.config.decode import AtLeast1
from kdjax.config.generate import ModelSection, RuntimeSection
from kdjax.config.mesh import ONE_DEVICE, MeshConfig
from kdjax.errors import KdjaxError
from kdjax.evaluate import documents, workbench
from kdjax.evaluate.documents import TextsSection
from kdjax.evaluate.rolling import Scorer
from kdjax.model.runtime import runtime_of
from kdjax.run import plot
from kdjax.run.experiment import Inputs, Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import Estimate, Metric, estimate

CLAIM = "how well the model predicts texts; every token is scored once, the first one after the start token"
METRICS = {
    "bits_per_byte": Metric(total="bits", per="bytes", definition="bits of all texts over their UTF-8 bytes"),
    "byte_perplexity": Metric(total="bits", per="bytes", base=2.0, definition="2 to the power of bits per byte"),
    "word_perplexity": Metric(
        total="bits",
        per="words",
        base=2.0,
        definition="2 to the power of bits per word; words are what white space parts, as lm-evaluation-harness counts",
    ),
}


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`window` and `stride` in tokens: see `kdjax.evaluate.rolling`.

    Without `window` it is the model's max_position_embeddings; without `stride` it is the window, which gives the
    disjoint windows of lm-evaluation-harness.
    """

    model: ModelSection = ModelSection()
    texts: TextsSection = TextsSection()
    window: AtLeast1 | None = None
    stride: AtLeast1 | None = None
    runtime: RuntimeSection = RuntimeSection()
    mesh: MeshConfig = ONE_DEVICE

    def __post_init__(self) -> None:
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise KdjaxError(f"stride={self.stride} exceeds window={self.window}: tokens in between would be left out")


def inputs(config: Config) -> Inputs:
    target, _ = locate(config.model, needs_drafter=False)
    texts = documents.file_of(config.texts, "texts")
    return Inputs({"target": target}, {"texts": texts}, runtime_of(config.runtime, config.mesh).backend)


def units(config: Config) -> list[str]:
    return [document.id for document in documents.read(config.texts, "texts")]


def measure(config: Config, units: Sequence[str]) -> Iterator[Record]:
    target, tokenizer, runtime = workbench.model(config.model, config.runtime, config.mesh)
    window = config.window or target.config.max_position_embeddings
    scorer = Scorer(target, runtime, window=window, stride=config.stride or window)
    wanted = set(units)
    for document in documents.read(config.texts, "texts"):
        if document.id in wanted:
            score = scorer.text(document.text, tokenizer.encode, tokenizer.start_id)
            words = len(re.split(r"\s+", document.text))
            yield {"unit": document.id, "domain": document.domain, **score._asdict(), "words": words}


def conclude(results: Sequence[Result]) -> list[str]:
    findings = []
    for result in results:
        parts = ", ".join(f"{domain} {found.value:.3f}" for domain, found in _by_domain(result).items())
        total = {key: sum(record[key] for record in result.records) for key in ("bytes", "words", "tokens")}
        findings.append(
            f"{_named(result, results)}bits per byte by domain: {parts}; {total['bytes']} bytes, {total['words']} "
            f"words and {total['tokens']} tokens ({total['bytes'] / total['tokens']:.2f} bytes per token) in "
            f"{len(result.records)} texts"
        )
    return findings


def _named(result: Result, results: Sequence[Result]) -> str:
    return f"{result.name}: " if len(results) > 1 else ""


def _by_domain(result: Result) -> dict[str, Estimate]:
    domains = dict.fromkeys(record["domain"] for record in result.records)
    found = {d: estimate(METRICS["bits_per_byte"], [r for r in result.records if r["domain"] == d]) for d in domains}
    return {domain: value for domain, value in found.items() if value is not None}


def draw(results: Sequence[Result], figure: Any) -> None:
    axes = figure.subplots()
    labels, estimates = [], []
    for result in results:
        for domain, found in {**_by_domain(result), "all": result.estimates["bits_per_byte"]}.items():
            labels.append(_named(result, results) + domain)
            estimates.append(found)
    plot.bars(axes, labels, estimates)
    axes.set(xlabel="bits per byte (bars: 95 % interval over texts)")
