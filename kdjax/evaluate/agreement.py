"""How far two runs of one model are from each other: other numerics, other kernels, a mesh, other weights."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float, Float64
from msgspec import Meta

from kdjax.bundled.locate import locate
from kdjax.config.decode import AtLeast1
from kdjax.config.generate import ModelSection, RuntimeSection
from kdjax.config.mesh import ONE_DEVICE, MeshConfig
from kdjax.evaluate import documents, workbench
from kdjax.evaluate.divergence import Referee, margins
from kdjax.evaluate.documents import TextsSection
from kdjax.evaluate.forward import Forward
from kdjax.model.runtime import runtime_of
from kdjax.run import plot
from kdjax.run.experiment import Inputs, Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import Metric
from kdjax.tokenizer import Tokenizer

CLAIM = "how far the next-token distributions of `test` are from those of `reference` after the same texts"
METRICS = {
    "kl_mean": Metric(total="kl_sum", per="tokens", definition="KL(reference || test) in nats, mean over tokens"),
    "kl_p99": Metric(total="kl", quantile=0.99, definition="99 % of the tokens are below"),
    "kl_max": Metric(total="kl", quantile=1.0, definition="of any token"),
    "top1": Metric(total="same", per="tokens", definition="share of tokens after which both rank the same token first"),
}


class Side(RuntimeSection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the two runs. `engine` "numpy" is the float64 reference, which no key of the runtime changes.

    `target`: another checkpoint of the same tokenizer than `model.target`, such as the unquantised one.
    """

    engine: Literal["jax", "numpy"] = "jax"
    target: str | None = None
    mesh: MeshConfig = ONE_DEVICE

    @property
    def left_open(self) -> list[str]:
        return [] if self.engine == "numpy" else super().left_open


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts are read in pieces of `window` tokens, each after a start token; at most `pieces` of each text."""

    model: ModelSection = ModelSection()
    reference: Side = Side(engine="numpy")
    test: Side = Side()
    texts: TextsSection = TextsSection()
    window: Annotated[int, Meta(ge=2)] = 256
    pieces: AtLeast1 | None = None


class Piece(NamedTuple):
    domain: str
    tokens: list[int]
    """The start token, then the text; each is followed by a distribution."""


def inputs(config: Config) -> Inputs:
    sides = config.reference, config.test
    backends = {s.engine if s.engine == "numpy" else runtime_of(s, s.mesh).backend for s in sides}
    folders = {"target": _folder(config, config.reference), "test": _folder(config, config.test)}
    return Inputs(folders, {"texts": documents.file_of(config.texts, "texts")}, "+".join(sorted(backends)))


def units(config: Config) -> list[str]:
    return list(_pieces(config))


def measure(config: Config, units: Sequence[str]) -> Iterator[Record]:
    test = _scorer(config, config.test)
    pieces = _pieces(config)
    for unit in units:
        domain, tokens = pieces[unit]
        yield {"unit": unit, "domain": domain, **compare(_reference(config, tokens), test(tokens))}


def compare(reference: Float[np.ndarray, "n vocab"], test: Float[np.ndarray, "n vocab"]) -> Record:
    """What the two sides' logits say about each other, row by row. `margins` are those of the reference."""
    kl = divergence(reference, test)
    gaps = margins(reference), margins(test)
    best = reference.argmax(1), test.argmax(1)
    partings = [
        {"row": row, "tokens": [int(b[row]) for b in best], "margins": [float(g[row]) for g in gaps]}
        for row in np.flatnonzero(best[0] != best[1]).tolist()
    ]
    return {
        "tokens": len(kl),
        "same": len(kl) - len(partings),
        "kl_sum": float(kl.sum()),
        "kl": kl.tolist(),
        "margins": gaps[0].tolist(),
        "partings": partings,
    }


def divergence(reference: Float[np.ndarray, "n vocab"], test: Float[np.ndarray, "n vocab"]) -> Float64[np.ndarray, "n"]:
    """KL(reference || test) of each row in nats. A sum of terms that cannot be negative, so that rounding cannot make
    near twins look closer than they are."""
    log_p, log_q = (_log_softmax(logits.astype(np.float64)) for logits in (reference, test))
    ratio = log_p - log_q
    return np.sum(np.exp(log_p) * (np.expm1(-ratio) + ratio), axis=1)


def _log_softmax(logits: Float64[np.ndarray, "n vocab"]) -> Float64[np.ndarray, "n vocab"]:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _folder(config: Config, side: Side) -> Path:
    section = config.model if side.target is None else msgspec.structs.replace(config.model, target=side.target)
    return locate(section, needs_drafter=False)[0]


def _pieces(config: Config) -> dict[str, Piece]:
    """By name: the id of the text, then the number of the piece."""
    tokenizer = Tokenizer.from_checkpoint(locate(config.model, needs_drafter=False)[0])
    found = {}
    for document in documents.read(config.texts, "texts"):
        ids = tokenizer.encode(document.text)
        size = config.window - 1  # after the start token
        for number, first in enumerate(range(0, len(ids), size)[: config.pieces]):
            found[f"{document.id}:{number}"] = Piece(document.domain, [tokenizer.start_id, *ids[first : first + size]])
    return found


def _scorer(config: Config, side: Side) -> Callable[[Sequence[int]], Float[np.ndarray, "n vocab"]]:
    """Logits after each token, as `side` computes them."""
    if side.engine == "numpy":
        return _referee(_folder(config, side)).logits
    section = config.model if side.target is None else msgspec.structs.replace(config.model, target=side.target)
    return _forward(section, side, config.window).logits


@functools.lru_cache(maxsize=2)
def _forward(section: ModelSection, side: Side, window: int) -> Forward:
    target, _, runtime = workbench.model(section, side, side.mesh)
    return Forward(target, runtime, context=window)


_kept: dict[object, Float[np.ndarray, "n vocab"]] = {}
KEPT_BYTES = 2**30


def _reference(config: Config, tokens: Sequence[int]) -> Float[np.ndarray, "n vocab"]:
    """Logits of the reference side, kept for the cells to come as long as there is room: NumPy takes its time."""
    key = config.model, config.reference, tuple(tokens)
    if key in _kept:
        return _kept[key]
    logits = _scorer(config, config.reference)(tokens)
    if sum(kept.nbytes for kept in _kept.values()) + logits.nbytes <= KEPT_BYTES:
        _kept[key] = logits
    return logits


@functools.lru_cache(maxsize=2)
def _referee(folder: Path) -> Referee:
    return Referee(folder)


def conclude(results: Sequence[Result]) -> list[str]:
    return [_finding(result) for result in results]


def _finding(result: Result) -> str:
    tokens, same = (sum(record[key] for record in result.records) for key in ("tokens", "same"))
    said = f"{result.name}: the same first choice after {same} of {tokens} tokens"
    partings = _partings(result)
    if not partings:
        return said
    usual = statistics.median(margin for record in result.records for margin in record["margins"])
    mine, other = (f"{statistics.median(side):.2g} (at most {max(side):.2g})" for side in zip(*partings, strict=True))
    return (
        f"{said}; where they part, the two best scores are a median of {mine} apart in the reference and {other} in "
        f"the test, against {usual:.2g} over all tokens"
    )


def _partings(result: Result) -> list[tuple[float, float]]:
    """Margins of reference and test where their first choices differ."""
    return [(*parting["margins"],) for record in result.records for parting in record["partings"]]


def draw(results: Sequence[Result], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    for style, result in enumerate(results):
        color, marker, dashes = plot.STYLES[style % len(plot.STYLES)]
        kl = np.sort([value for record in result.records for value in record["kl"]])
        partings = np.reshape(_partings(result), (-1, 2))
        left.plot(np.maximum(kl, FLOOR), 1 - np.arange(len(kl)) / len(kl), color=color, linestyle=dashes)
        right.plot(*partings.T, color=color, marker=marker, linestyle="none", markersize=5, alpha=0.7)
        label = f"{result.name}: {len(partings)} of {len(kl)} first choices differ"
        figure.gca().plot([], [], color=color, marker=marker, linestyle=dashes, label=label)
    left.set(
        xscale="log", yscale="log", xlabel="KL(reference || test), nats", ylabel="share of tokens with at least that"
    )
    right.set(xlim=(0, None), ylim=(0, None), title="where the first choices differ")
    right.set(xlabel="margin in the reference", ylabel="margin in the test")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8)


FLOOR = 1e-17
"""Below the resolution of float64: where a logarithmic axis draws what is exactly equal."""
