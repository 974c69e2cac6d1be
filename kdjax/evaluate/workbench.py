"""Models, prompts and decoders that the cells of a run share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta

from kdjax.bundled.locate import locate
from kdjax.checkpoint import Drafter, Target, load_drafter, load_target
from kdjax.config.decode import AtLeast1
from kdjax.config.generate import ModelSection, RuntimeSection
from kdjax.config.mesh import ONE_DEVICE, MeshConfig
from kdjax.decode import DecodeConfig, Decoder, Request
from kdjax.decode.limits import check_decoding
from kdjax.errors import KdjaxError
from kdjax.evaluate import documents
from kdjax.evaluate.documents import Selection
from kdjax.model.runtime import Runtime, runtime_of
from kdjax.run.experiment import Inputs
from kdjax.tokenizer import Tokenizer


class PromptsSection(Selection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each prompt is continued by up to `new_tokens`; prompt i draws with seed `seed` + i."""

    file: str = "bundled:mixed"
    new_tokens: AtLeast1 = 128
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class Model(NamedTuple):
    """A loaded target with the runtime that it was loaded for."""

    target: Target
    tokenizer: Tokenizer
    runtime: Runtime


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


def inputs(
    model: ModelSection,
    runtime: RuntimeSection,
    decode: DecodeConfig,
    prompts: PromptsSection | None = None,
    mesh: MeshConfig = ONE_DEVICE,
    *,
    needs_drafter: bool = True,
) -> Inputs:
    """What the provenance has to pin. Raises KdjaxError where one of them is missing or no decoder accepts `decode`."""
    target, drafter = locate(model, needs_drafter=needs_drafter)
    check_decoding(decode, target, drafter)
    files = {"prompts": documents.file_of(prompts, "prompts")} if prompts else {}
    checkpoints = {"target": target} | ({"drafter": drafter} if drafter else {})
    return Inputs(checkpoints, files, runtime_of(runtime, mesh).backend)


def model(section: ModelSection, runtime: RuntimeSection, mesh: MeshConfig = ONE_DEVICE) -> Model:
    """The target alone. Raises KdjaxError for an unusable checkpoint, or one with another model's tokenizer."""
    folder, _ = locate(section, needs_drafter=False)
    return _model(folder, runtime_of(runtime, mesh))


@functools.lru_cache(maxsize=2)
def _model(folder: Path, numerics: Runtime) -> Model:
    """Loaded once for all cells that name it."""
    tokenizer = Tokenizer.from_checkpoint(folder)
    target = load_target(folder, numerics)
    if (vocabulary := target.config.vocab_size) != tokenizer.vocab_size:
        raise KdjaxError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids and the model {vocabulary}: "
            "put the tiktoken.model of this checkpoint there"
        )
    return Model(target, tokenizer, numerics)


@functools.lru_cache(maxsize=2)
def pair(section: ModelSection, runtime: RuntimeSection, mesh: MeshConfig = ONE_DEVICE) -> Pair:
    """Loaded once for all cells that name it. Raises KdjaxError for an unusable checkpoint."""
    folder, drafter_folder = locate(section, needs_drafter=True)
    assert drafter_folder is not None
    target, tokenizer, numerics = model(section, runtime, mesh)
    drafter = load_drafter(
        drafter_folder,
        numerics,
        target.config,
        target_path=folder,
        allow_mismatch=section.allow_mismatch,
        overrides=section.drafter_overrides,
    )
    return Pair(target, drafter, tokenizer, numerics)


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
        for i, prompt in enumerate(documents.read(section, "prompts"))
    }


def context_for(many: Sequence[Request]) -> int:
    """Tokens that the longest of the requests takes, rounded up so that runs over other prompts share a program."""
    return -(-max(len(r.prompt_ids) + r.max_new_tokens for r in many) // 64) * 64


@functools.lru_cache(maxsize=16)
def decoder(
    section: ModelSection,
    runtime: RuntimeSection,
    config: DecodeConfig,
    slots: int,
    context: int,
    mesh: MeshConfig = ONE_DEVICE,
) -> Decoder:
    """Compiled once for all cells that decode alike."""
    target, _, numerics = model(section, runtime, mesh)
    context = min(context, target.config.max_position_embeddings)
    drafter = None if config.mode == "autoregressive" else pair(section, runtime, mesh).drafter
    return Decoder(target, drafter, config, numerics, slots=slots, context=context)
