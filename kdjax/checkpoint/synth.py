"""Checkpoints of random weights in the layout of Kimi K2.6, at any scale, to exercise I/O and memory.

Values come from tables of 65,536 entries, which random bits index: a core writes about a gigabyte per second, so that
the disk is the limit. A tensor depends on the seed and its name alone, not on what else is written.
"""

from __future__ import annotations

import base64
import functools
import itertools
import pathlib
import statistics
import zlib
from collections.abc import Iterator

import msgspec
import numpy as np
from jaxtyping import Float32, UInt16

from kdjax.checkpoint import int4
from kdjax.checkpoint.hf_config import write_drafter_config, write_model_config
from kdjax.checkpoint.layout import DTYPES, Leaf, Stored, drafter_leaves, target_leaves
from kdjax.checkpoint.params import expected_tensors
from kdjax.checkpoint.target import WRAPPER_PREFIX
from kdjax.checkpoint.writer import Job, Progress, Shard, by_size, write_folder
from kdjax.config import DrafterConfig, ModelConfig
from kdjax.errors import KdjaxError
from kdjax.output import writing

ENTRIES = 2**16
BLOCK = 2**20
ROUTER_BIAS = 7.0
"""Where the biases of trained routers sit."""


def shorten(
    target: ModelConfig, drafter: DrafterConfig | None, layers: int
) -> tuple[ModelConfig, DrafterConfig | None]:
    """The same models with `layers` target layers; the drafter's taps keep their relative heights.

    Raises:
        KdjaxError: the target has fewer layers.
    """
    if layers > target.num_hidden_layers:
        raise KdjaxError(f"the model has {target.num_hidden_layers} layers, not {layers}: ask for at most those")
    short = msgspec.structs.replace(target, num_hidden_layers=layers)
    if drafter is None:
        return short, None
    top, new_top = drafter.num_target_layers - 1, layers - 1
    taps = tuple(round(tap * new_top / top) if top else 0 for tap in drafter.target_layer_ids)
    return short, msgspec.structs.replace(drafter, num_target_layers=layers, target_layer_ids=taps)


def write_target(
    folder: str | pathlib.Path,
    config: ModelConfig,
    *,
    seed: int = 0,
    workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> int:
    """A target with K2.6's wrapper config and its division into files: one per layer, then embeddings and lm_head.

    Also a `tiktoken.model` with the right number of ranks where the vocabulary has room for single bytes. Returns the
    bytes of all tensors.

    Raises:
        KdjaxError: the folder already holds weights, or its disk lacks room.
    """
    folder = pathlib.Path(folder)
    leaves = list(target_leaves(config, lambda module: config.experts_int4))
    shards: dict[str | int, Shard] = {}
    for leaf in sorted(leaves, key=lambda leaf: leaf.path[0] != "layers"):
        part = leaf.path[1] if leaf.path[0] == "layers" else "rest"
        shards.setdefault(part, {}).update(expected_tensors([leaf], WRAPPER_PREFIX))
    write_folder(folder, list(shards.values()), _jobs(leaves, WRAPPER_PREFIX, seed), workers=workers, progress=progress)
    write_model_config(folder, config, wrapper=True)
    if config.vocab_size >= 512:
        ranks = folder / "tiktoken.model"
        with writing(ranks):
            ranks.write_bytes(_ranks(config.vocab_size - 256))
    return sum(stored.nbytes for shard in shards.values() for stored in shard.values())


def write_drafter(
    folder: str | pathlib.Path,
    config: DrafterConfig,
    *,
    seed: int = 0,
    workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> int:
    """A drafter in one file. Returns the bytes of all tensors.

    Raises:
        KdjaxError: the folder already holds weights, or its disk lacks room.
    """
    leaves = list(drafter_leaves(config))
    tensors = expected_tensors(leaves)
    write_folder(folder, by_size(tensors, None), _jobs(leaves, "", seed), workers=workers, progress=progress)
    write_drafter_config(folder, config)
    return sum(stored.nbytes for stored in tensors.values())


def _jobs(leaves: list[Leaf], prefix: str, seed: int) -> Iterator[Job]:
    for leaf in leaves:
        for module in leaf.modules:
            yield functools.partial(_tensors, leaf, prefix + module, seed)


def _tensors(leaf: Leaf, module: str, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    for name, stored in leaf.tensors(module).items():
        rng = np.random.SFC64([seed, zlib.crc32(name.encode())])
        yield name, _values(leaf, name.rpartition(".")[2], stored, rng)


def _values(leaf: Leaf, part: str, stored: Stored, rng: np.random.SFC64) -> np.ndarray:
    if part == "weight_shape":
        return np.array(leaf.shape, np.int32)
    if part == "weight_packed":
        rows, words = stored.shape
        halves = _look_up(_packed_codes(), rows * words * 2, rng)
        return halves.view(np.int32).reshape(stored.shape)
    if part == "weight_scale":
        # Codes times scale then have the spread of a dense weight.
        return _normal(stored, _spread(leaf) / _code_deviation(), 0.1, rng)
    if leaf.bias:
        return _normal(stored, ROUTER_BIAS, 0.01, rng)
    if len(leaf.shape) == 1:
        return _normal(stored, 1.0, 0.05, rng)
    return _normal(stored, 0.0, _spread(leaf), rng)


def _spread(leaf: Leaf) -> float:
    """Standard deviation that keeps the size of what a matrix multiplies; rows of the embedding have size 1."""
    return 1.0 if leaf.path[0] == "embed_tokens" else leaf.shape[-1] ** -0.5


def _normal(stored: Stored, mean: float, deviation: float, rng: np.random.SFC64) -> np.ndarray:
    """`mean` plus noise; where there is a mean, `deviation` is relative to it."""
    table = _quantiles() * np.float32(deviation)
    if mean:
        table = np.float32(mean) * (1 + table)
    dtype = DTYPES[stored.dtypes[0]]
    return _look_up(table.astype(dtype), int(np.prod(stored.shape)), rng).reshape(stored.shape)


def _look_up(table: np.ndarray, n: int, rng: np.random.SFC64) -> np.ndarray:
    out = np.empty(n, table.dtype)
    for start in range(0, n, BLOCK):
        part = out[start : start + BLOCK]
        bits = rng.random_raw(-(-len(part) // 4)).view(np.uint16)[: len(part)]
        # mode: "raise" would buffer the output.
        np.take(table, bits, out=part, mode="clip")
    return out


@functools.cache
def _quantiles() -> Float32[np.ndarray, "65536"]:
    """Those of the standard normal distribution."""
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / ENTRIES) for i in range(ENTRIES)], np.float32)


@functools.cache
def _codes() -> np.ndarray:
    """Four INT4 codes per entry: normal weights under the max/7 rule, whose groups of 32 peak at two deviations."""
    return np.clip(np.rint(np.random.default_rng(0).normal(0, 7 / 2.07, (ENTRIES, 4))), -7, 7).astype(np.int8)


@functools.cache
def _code_deviation() -> float:
    return float(_codes().astype(np.float64).std())


@functools.cache
def _packed_codes() -> UInt16[np.ndarray, "65536"]:
    words = int4.pack(_codes()).reshape(-1)
    return words.astype(np.uint32).astype(np.uint16)


def _ranks(n: int) -> bytes:
    """A tiktoken file of `n` ranks: all bytes, then pairs and triples of bytes, each the merge of two earlier ranks."""
    tokens = itertools.chain.from_iterable(itertools.product(range(256), repeat=size) for size in (1, 2, 3))
    return b"".join(b"%s %d\n" % (base64.b64encode(bytes(next(tokens))), rank) for rank in range(n))
