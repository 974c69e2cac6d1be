"""Models, prompts and decoders that the cells of a run share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kdjax.checkpoint import Drafter, Target, load_drafter, load_target
from kdjax.cli.models import BUNDLED, locate
from kdjax.config.decode import AtLeast0, AtLeast1
from kdjax.config.generate import ModelSection, RuntimeSection
from kdjax.config.strict import closest
from kdjax.decode import DecodeConfig, Decoder, Request
from kdjax.errors import KdjaxError
from kdjax.model.runtime import Runtime, runtime_of
from kdjax.run.experiment import Inputs
from kdjax.tokenizer import Tokenizer

SHELF = Path(__file__).parent / "prompts"


class PromptsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` prompts of a file after the first `skip`, all without it; each is continued by up to `new_tokens`.

    `file`: JSON lines with the keys id, domain and text, or `bundled:NAME`. Prompt i draws with seed `seed` + i.
    """

    file: str = "bundled:mixed"
    skip: AtLeast0 = 0
    count: AtLeast1 | None = None
    new_tokens: AtLeast1 = 128
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    domain: str
    text: str


class Pair(NamedTuple):
    """A loaded target and drafter with the runtime they were loaded for."""

    target: Target
    drafter: Drafter
    tokenizer: Tokenizer
    runtime: Runtime

    @property
    def depth(self) -> int:
        """Tokens that the drafter proposes at once."""
        return self.drafter.config.block_size - 1


def inputs(model: ModelSection, runtime: RuntimeSection, prompts: PromptsSection | None = None) -> Inputs:
    """What the provenance has to pin. Raises KdjaxError where one of them is missing."""
    target, drafter = locate(model, needs_drafter=True)
    assert drafter is not None
    files = {"prompts": prompt_file(prompts)} if prompts else {}
    return Inputs({"target": target, "drafter": drafter}, files, runtime_of(runtime).backend)


@functools.lru_cache(maxsize=2)
def pair(model: ModelSection, runtime: RuntimeSection) -> Pair:
    """Loaded once for all cells that name it. Raises KdjaxError for an unusable checkpoint."""
    target_folder, drafter_folder = locate(model, needs_drafter=True)
    assert drafter_folder is not None
    numerics = runtime_of(runtime)
    target = load_target(target_folder, numerics)
    drafter = load_drafter(drafter_folder, numerics, target.config)
    return Pair(target, drafter, Tokenizer.from_checkpoint(target_folder), numerics)


def prompt_file(section: PromptsSection) -> Path:
    if not section.file.startswith(BUNDLED):
        if not Path(section.file).is_file():
            raise KdjaxError(f"prompts.file = {section.file!r}: no such file: give JSON lines or {BUNDLED}NAME")
        return Path(section.file)
    name = section.file.removeprefix(BUNDLED)
    names = sorted(file.stem for file in SHELF.glob("*.jsonl"))
    if name not in names:
        raise KdjaxError(f"prompts.file = {section.file!r}: no such bundled prompts: {closest(name, names)}")
    return SHELF / f"{name}.jsonl"


def read_prompts(section: PromptsSection) -> list[Prompt]:
    """Raises KdjaxError for a line that is not a prompt, an id that is there twice, or fewer prompts than `count`."""
    file = prompt_file(section)
    found: dict[str, Prompt] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            prompt = msgspec.json.decode(line, type=Prompt)
        except msgspec.DecodeError as error:
            raise KdjaxError(f"{file}, line {number}: {error}: write id, domain and text as one JSON object") from error
        if prompt.id in found:
            raise KdjaxError(f"{file}, line {number}: the id {prompt.id!r} is there already: give each its own")
        found[prompt.id] = prompt
    left = len(found) - section.skip
    count = left if section.count is None else section.count
    if not 0 < count <= left:
        raise KdjaxError(
            f"{file} has {len(found)} prompts, prompts.skip = {section.skip} and count = {section.count}: lower them "
            "or add prompts"
        )
    return list(found.values())[section.skip :][:count]


def requests(section: PromptsSection, tokenizer: Tokenizer) -> dict[str, Request]:
    """A request per prompt, by id, with the stop tokens of the model."""
    stops = tuple(sorted(tokenizer.stop_token_ids))
    return {
        prompt.id: Request(
            prompt_ids=tuple(tokenizer.encode_prompt(prompt.text)),
            max_new_tokens=section.new_tokens,
            seed=section.seed + i,
            stop_token_ids=stops,
        )
        for i, prompt in enumerate(read_prompts(section))
    }


def context_for(many: Sequence[Request]) -> int:
    """Tokens that the longest of the requests takes, rounded up so that runs over other prompts share a program."""
    return -(-max(len(r.prompt_ids) + r.max_new_tokens for r in many) // 64) * 64


@functools.lru_cache(maxsize=16)
def decoder(model: ModelSection, runtime: RuntimeSection, config: DecodeConfig, slots: int, context: int) -> Decoder:
    """Compiled once for all cells that decode alike."""
    models = pair(model, runtime)
    context = min(context, models.target.config.max_position_embeddings)
    drafter = None if config.mode == "autoregressive" else models.drafter
    return Decoder(models.target, drafter, config, models.runtime, slots=slots, context=context)
