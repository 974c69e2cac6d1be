"""Building trees: the heap on the host against the static candidates on the device."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from msgspec import Meta

from kdjax.config.decode import AtLeast1
from kdjax.reference import tree as reference
from kdjax.run import plot
from kdjax.run.experiment import Inputs, Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import Metric
from kdjax.tree import build, marginals
from kdjax.tree.bench import matches_reference

CLAIM = "DDTree (arXiv 2604.12989), algorithm 1: its heap gives these trees; here a fixed candidate set gives them too"
METRICS = {
    "device_us": Metric(total="device_us", definition="from draft logits to trees on the device, top-k included"),
    "host_us": Metric(
        total="host_us", definition="top-k on the device, copy to the host, and the heap in Python, stream by stream"
    ),
    "heap_us": Metric(total="heap_us", definition="the heap in Python alone"),
    "equal": Metric(total="equal", definition="share of the inputs whose trees are those of the heap"),
}


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`inputs` draws of draft logits for `streams` streams; each is timed `repeats` times, the fastest counts."""

    streams: AtLeast1 = 1
    budget: AtLeast1 = 15
    depth: Annotated[int, Meta(ge=1, le=15)] = 7
    vocab: AtLeast1 = 4096
    spread: float = 4.0
    inputs: AtLeast1 = 8
    repeats: AtLeast1 = 5
    seed: int = 0


def inputs(config: Config) -> Inputs:
    return Inputs(backend="xla")


def measure(config: Config) -> Iterator[Record]:
    top = min(config.budget, config.vocab)
    roots = jnp.zeros((config.streams,), jnp.int32)
    on_device = jax.jit(functools.partial(build, budget=config.budget))
    table = jax.jit(functools.partial(marginals, k=top))
    rng = np.random.default_rng(config.seed)
    for i in range(config.inputs):
        drawn = rng.standard_normal((config.streams, config.depth, config.vocab)).astype(np.float32)
        drafts = jnp.asarray(drawn * np.float32(config.spread))
        lp, ids = jax.device_get(table(drafts))

        def heaps(lp: np.ndarray = lp, ids: np.ndarray = ids) -> list[reference.Tree]:
            return [reference.heap_tree(*one, config.budget) for one in zip(lp, ids, strict=True)]

        trees = on_device(drafts, roots)
        host = np.asarray(drafts)
        equal = all(matches_reference(host[s], trees, s, config.budget) for s in range(config.streams))
        built = fastest(lambda x=drafts: jax.block_until_ready(on_device(x, roots)), config.repeats)
        whole = fastest(lambda x=drafts, f=heaps: f(*jax.device_get(table(x))), config.repeats)
        timings = {"device_us": built, "host_us": whole, "heap_us": fastest(heaps, config.repeats)}
        device_kind = jax.devices()[0].device_kind
        yield {"unit": f"input {i}", "equal": equal, "device": device_kind, "timings": timings}


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Microseconds; the first call, which may compile, does not count."""
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times) * 1e6


def conclude(results: Sequence[Result]) -> list[str]:
    equal = sum(r.value("equal") * r.estimates["equal"].n for r in results)
    total = sum(r.estimates["equal"].n for r in results)
    findings = [f"the trees of {equal:.0f} of {total} inputs are those of the heap"]
    ratios = {r.name: r.value("host_us") / r.value("device_us") for r in results}
    slow, fast = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    findings.append(
        f"the way over the host takes {ratios[slow]:.2f} times as long as the device builder at {slow} and "
        f"{ratios[fast]:.2f} times at {fast}"
    )
    share = [r.value("heap_us") / r.value("host_us") for r in results]
    findings.append(f"the heap itself is {min(share):.0%} to {max(share):.0%} of the way over the host")
    device = results[0].records[0]["device"]
    without = ", where there is no copy between devices to save" if device == "cpu" else ""
    findings.append(f"measured on {device}{without}")
    return findings


def draw(results: Sequence[Result], figure: Any) -> None:
    axes = figure.subplots()
    streams = sorted({r.config.streams for r in results})
    for i, count in enumerate(streams):
        many = sorted((r for r in results if r.config.streams == count), key=lambda r: r.config.budget)
        budgets = [r.config.budget for r in many]
        for offset, metric in enumerate(("device_us", "host_us")):
            label = f"{'device' if metric == 'device_us' else 'over the host'}, {count} stream(s)"
            plot.line(axes, budgets, [r.estimates[metric] for r in many], 2 * i + offset, label)
    plot.log_x(axes, [r.config.budget for r in results])
    axes.set(xlabel="tree nodes", ylabel="microseconds", ylim=(0, None))
    axes.legend()
