"""Corpus -> tokens -> random windows, all on the device."""

from __future__ import annotations

import concurrent.futures
import gzip
import multiprocessing
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt16

from experiments.nano.config import DataConfig
from kdjax.errors import KdjaxError
from kdjax.tokenizer import Tokenizer

SEPARATOR = "<|endoftext|>"
CHUNK_CHARS = 1 << 20


class Corpus(NamedTuple):
    """Token arrays by domain (file stem), the end-of-text id between documents, and the bytes they stand for."""

    tokens: dict[str, np.ndarray]
    bytes: dict[str, int]


class Windows(NamedTuple):
    """Domains laid end to end. Windows start at multiples of `stride` inside a domain."""

    tokens: UInt16[Array, " total"]
    first: Int[Array, " domains"]
    length: Int[Array, " domains"]
    stride: Int[Array, " domains"]
    cumulative: Float[Array, " domains"]

    def sample(self, key: Array, batch: int, length: int) -> Int[Array, "batch length"]:
        """Draws a domain by weight, then a window in it, uniformly."""
        choose, place = jax.random.split(key)
        domain = jnp.searchsorted(self.cumulative, jax.random.uniform(choose, (batch,)))
        domain = jnp.minimum(domain, self.length.shape[0] - 1)
        slots = jnp.maximum((self.length[domain] - length) // self.stride[domain] + 1, 1)
        start = (jax.random.uniform(place, (batch,)) * slots).astype(jnp.int32) * self.stride[domain]
        index = (self.first[domain] + start)[:, None] + jnp.arange(length, dtype=jnp.int32)
        return self.tokens[index].astype(jnp.int32)


def read_documents(config: DataConfig, split: str) -> Iterator[tuple[str, list[str]]]:
    """(domain, its documents) for each file of `corpus/split`, in order of name. Raises KdjaxError without any file."""
    folder = pathlib.Path(config.corpus) / split
    files = sorted(p for p in folder.glob("*") if p.name.endswith((".txt", ".txt.gz")))
    if not files:
        raise KdjaxError(f"no .txt or .txt.gz file in {folder}: point data.corpus at a folder with train/ and heldout/")
    for path in files:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        yield path.name.split(".")[0], [d for d in text.split(SEPARATOR) if d.strip()]


def read_corpus(config: DataConfig, split: str) -> Corpus:
    """Tokenises `corpus/split/*`, in parallel over chunks of documents."""
    tokens: dict[str, list[np.ndarray]] = {}
    sizes: dict[str, int] = {}
    # spawn: JAX has threads by now, and a forked child could inherit a lock that nobody releases
    with concurrent.futures.ProcessPoolExecutor(
        mp_context=multiprocessing.get_context("spawn"), initializer=_open_tokenizer, initargs=(config.tokenizer,)
    ) as pool:
        for name, documents in read_documents(config, split):
            sizes[name] = sum(len(d.encode()) for d in documents)
            tokens[name] = list(pool.map(_encode, _chunks(documents)))
    return Corpus({name: np.concatenate(parts) for name, parts in tokens.items()}, sizes)


def _chunks(documents: list[str]) -> list[list[str]]:
    chunks: list[list[str]] = [[]]
    size = 0
    for document in documents:
        if size > CHUNK_CHARS:
            chunks.append([])
            size = 0
        chunks[-1].append(document)
        size += len(document)
    return chunks


_tokenizer: Tokenizer


def _open_tokenizer(path: str) -> None:
    global _tokenizer
    _tokenizer = Tokenizer.from_file(pathlib.Path(path))


def _encode(documents: list[str]) -> np.ndarray:
    ids: list[int] = []
    for document in documents:
        ids += _tokenizer.encode(document)
        ids.append(_tokenizer.eos_id)
    return np.asarray(ids, np.uint16)


def domain_shares(config: DataConfig, sizes: dict[str, int]) -> dict[str, float]:
    """The share of each domain, summing to one; longest matching prefix wins."""
    groups: dict[str, list[str]] = {}
    for name in sizes:
        match = max((p for p in config.weights if name.startswith(p)), key=len, default=None)
        if match is not None and config.weights[match] > 0:
            groups.setdefault(match, []).append(name)
    if not groups:
        raise KdjaxError(f"data.weights {sorted(config.weights)} match none of the files {sorted(sizes)}")
    shares = {}
    for prefix, names in groups.items():
        total = sum(sizes[n] for n in names)
        shares |= {n: config.weights[prefix] * sizes[n] / total for n in names}
    scale = sum(shares.values())
    return {n: s / scale for n, s in shares.items()}


def windows(tokens: dict[str, np.ndarray], shares: dict[str, float], strides: dict[str, int] | None = None) -> Windows:
    """Lays the domains that have a share end to end on the device."""
    names = sorted(shares)
    lengths = np.array([len(tokens[n]) for n in names])
    return Windows(
        tokens=jnp.asarray(np.concatenate([tokens[n] for n in names])),
        first=jnp.asarray(np.concatenate([[0], np.cumsum(lengths)[:-1]]), jnp.int32),
        length=jnp.asarray(lengths, jnp.int32),
        stride=jnp.asarray([(strides or {}).get(n, 1) for n in names], jnp.int32),
        cumulative=jnp.asarray(np.cumsum([shares[n] for n in names]), jnp.float32),
    )
