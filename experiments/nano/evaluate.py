"""Measures a checkpoint on held-out text: bits per byte beside general compressors, and acceptance by domain."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, TypeVar

import jax
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.nano import acceptance, compressors
from experiments.nano.agreement import Parting
from experiments.nano.config import Cell, EvaluateConfig, NanoConfig
from experiments.nano.data import read_documents
from experiments.nano.tables import markdown
from kdjax.bundled.locate import locate
from kdjax.checkpoint import Drafter, Target, load_drafter, load_target, sha256
from kdjax.cli.start import configure_jax
from kdjax.decode import DecodeConfig, Decoder
from kdjax.errors import KdjaxError
from kdjax.evaluate import Score, Scorer, pool
from kdjax.evaluate.divergence import Referee, first_difference
from kdjax.evaluate.loops import repeats
from kdjax.model.runtime import CPU_EXACT
from kdjax.tokenizer import Tokenizer

GROUPS = {"python": "py_", "docs": "doc_", "prose": "prose_"}
"""Sums over domains, by prefix of their name."""

Measured = TypeVar("Measured")


class Bits(msgspec.Struct, frozen=True):
    """A domain's documents under the model, and end to end under compressors; sizes in bytes."""

    documents: tuple[Score, ...]
    xz_bytes: int
    zpaq_bytes: int | None


def run(config: NanoConfig, folder: pathlib.Path) -> None:
    """Writes `evaluation.json` and `evaluation.md` in `folder`; what `folder/evaluation/` holds is not measured again.

    Runs in float32: the modes must give the same tokens, but for scores that are equal up to rounding.

    Raises KdjaxError where `folder` holds measurements with other settings or of other weights, or modes disagree.
    """
    configure_jax(compilation_cache=True)
    settings = config.evaluate
    target_folder, drafter_folder = locate(settings.model, needs_drafter=True)
    assert drafter_folder is not None
    target = load_target(target_folder, CPU_EXACT)
    drafter = load_drafter(drafter_folder, CPU_EXACT, target.config)
    tokenizer = Tokenizer.from_checkpoint(target_folder)
    documents = dict(read_documents(config.data, "heldout"))
    prompts = {
        domain: acceptance.prompts([tokenizer.encode(t) for t in texts], settings.prompts, settings.prompt_len)
        for domain, texts in documents.items()
    }
    kept = folder / "evaluation"
    kept.mkdir(parents=True, exist_ok=True)
    provenance = {
        "sha256": {"target": sha256(target_folder), "drafter": sha256(drafter_folder)},
        "settings": {name: value for name, value in msgspec.to_builtins(settings).items() if name != "cells"},
    }
    remember(kept / "settings.json", dict, lambda: provenance, expected=provenance)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        outputs = {
            cell.name: measure_cell(cell, settings, target, drafter, tokenizer, prompts, kept, progress)
            for cell in settings.cells
        }
        bits = measure_bits(settings, target, tokenizer, documents, kept, progress)
    result = {
        **provenance,
        "jax": metadata.version("jax"),
        "devices": [f"{d.platform}:{d.device_kind}" for d in jax.devices()],
        "bits_per_byte": {name: bits_entry([bits[d] for d in members]) for name, members in _groups(bits).items()},
        "acceptance": {
            cell: {
                name: acceptance_entry([o for d in members for o in by_domain[d]])
                for name, members in _groups(by_domain).items()
            }
            for cell, by_domain in outputs.items()
        },
        "outputs": sum(len(many) for by_domain in outputs.values() for many in by_domain.values()),
        "partings": partings(settings.cells, outputs, prompts, settings.seed, Referee(target_folder)),
    }
    (folder / "evaluation.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    (folder / "evaluation.md").write_text(markdown(result, settings.cells, list(GROUPS)) + "\n")


def remember(
    file: pathlib.Path, kind: type[Measured], measure: Callable[[], Measured], *, expected: Measured | None = None
) -> Measured:
    """The value in `file`, measured and written where it is absent. Raises KdjaxError if it is not `expected`."""
    if not file.exists():
        part = file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(measure()))
        part.replace(file)
    value = msgspec.json.decode(file.read_bytes(), type=kind)
    if expected is not None and value != expected:
        raise KdjaxError(f"{file} belongs to another checkpoint or other settings: give another --out")
    return value


def measure_cell(
    cell: Cell,
    settings: EvaluateConfig,
    target: Target,
    drafter: Drafter,
    tokenizer: Tokenizer,
    prompts: dict[str, list[tuple[int, ...]]],
    kept: pathlib.Path,
    progress: Progress,
) -> dict[str, list[acceptance.Output]]:
    """The outputs of each domain. One decoder, hence one compiled program, serves all domains."""
    decoder = Decoder(
        target,
        drafter,
        DecodeConfig(mode=cell.mode, budget=cell.budget, temperature=cell.temperature),
        CPU_EXACT,
        slots=settings.slots,
        context=settings.prompt_len + settings.new_tokens,
    )

    task = progress.add_task(cell.name, total=len(prompts))
    result = {}
    for domain, many in prompts.items():
        result[domain] = remember(
            kept / f"{cell.name}.{domain}.json",
            list[acceptance.Output],
            lambda many=many: acceptance.measure(decoder, tokenizer, many, settings.new_tokens, settings.seed),
        )
        progress.advance(task)
    return result


def measure_bits(
    settings: EvaluateConfig,
    target: Target,
    tokenizer: Tokenizer,
    documents: dict[str, list[str]],
    kept: pathlib.Path,
    progress: Progress,
) -> dict[str, Bits]:
    """Every document starts after the token that starts a prompt; compressors see a domain's documents end to end."""
    scorer = Scorer(target, CPU_EXACT, stride=settings.stride)
    (start,) = tokenizer.prompt_prefix
    task = progress.add_task("bits per byte", total=len(documents))

    def bits(texts: list[str]) -> Bits:
        scores = tuple(scorer.text(text, tokenizer.encode, start) for text in texts)
        data = "".join(texts).encode()
        return Bits(scores, compressors.xz_bytes(data), compressors.zpaq_bytes(data))

    result = {}
    for domain, texts in documents.items():
        result[domain] = remember(kept / f"bits.{domain}.json", Bits, lambda texts=texts: bits(texts))
        progress.advance(task)
    return result


def partings(
    cells: Sequence[Cell],
    outputs: dict[str, dict[str, list[acceptance.Output]]],
    prompts: dict[str, list[tuple[int, ...]]],
    seed: int,
    referee: Referee,
) -> list[Parting]:
    """Where a mode leaves the text of the first mode of the same temperature.

    Raises KdjaxError where it is not rounding that parts them.
    """
    first: dict[float, Cell] = {}
    found = []
    for cell in cells:
        usual = first.setdefault(cell.temperature, cell)
        for domain, many in outputs[cell.name].items():
            for i, (mine, theirs) in enumerate(zip(many, outputs[usual.name][domain], strict=True)):
                at = first_difference(mine.token_ids, theirs.token_ids)
                if at is None:
                    continue
                if at == min(len(mine.token_ids), len(theirs.token_ids)):
                    raise KdjaxError(f"{cell.name}, {domain}, prompt {i}: the text ends elsewhere than in {usual.name}")
                tokens = theirs.token_ids[at], mine.token_ids[at]
                gap = referee.gap(prompts[domain][i] + mine.token_ids[:at], tokens, cell.temperature, seed + i)
                found.append(Parting(cell.temperature, domain, i, at, tokens, gap))
                if not found[-1].is_rounding:
                    raise KdjaxError(
                        f"{cell.name}, {domain}, prompt {i}: token {at} is not that of {usual.name}: {gap=}"
                    )
    return found


def _groups(domains: dict[str, Any]) -> dict[str, list[str]]:
    """Every domain by itself, then the sums."""
    sums = {name: [d for d in domains if d.startswith(prefix)] for name, prefix in GROUPS.items()}
    return {d: [d] for d in domains} | {name: members for name, members in sums.items() if members}


def bits_entry(parts: list[Bits]) -> dict[str, Any]:
    total = pool(score for part in parts for score in part.documents)
    zpaq = [p.zpaq_bytes for p in parts if p.zpaq_bytes is not None]
    return {
        "bytes": total.bytes,
        "tokens": total.tokens,
        "model": total.bits_per_byte,
        "xz": 8 * sum(p.xz_bytes for p in parts) / total.bytes,
        "zpaq": 8 * sum(zpaq) / total.bytes if len(zpaq) == len(parts) else None,
    }


def acceptance_entry(outputs: list[acceptance.Output]) -> dict[str, Any]:
    """Summaries over all outputs, over those that do not loop, and over those that do not repeat themselves at all."""
    no_loops = [o for o in outputs if not o.loops]
    fresh = [o for o in no_loops if not repeats(o.token_ids)]
    return {
        "looping": 1 - len(no_loops) / len(outputs),
        "repeating": 1 - len(fresh) / len(outputs),
        "without_loops": acceptance.summary(no_loops),
        "without_repetition": acceptance.summary(fresh),
        "with_loops": acceptance.summary(outputs),
    }
