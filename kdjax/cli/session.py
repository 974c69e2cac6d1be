"""One loaded model pair and its prompts, decoded in one mode after another. Imports JAX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdjax.checkpoint import Monitor, load_drafter, load_target
from kdjax.checkpoint.writer import Progress
from kdjax.cli.interrupt import Interrupt
from kdjax.cli.live import Live
from kdjax.cli.report import Outcome
from kdjax.config import GenerateConfig
from kdjax.decode import Completion, DecodeConfig, Decoder, Request
from kdjax.errors import KdjaxError
from kdjax.model.runtime import runtime_of
from kdjax.tokenizer import Tokenizer


class Session:
    """Raises KdjaxError where a checkpoint is unusable or tokenizer, target and drafter do not fit together."""

    def __init__(
        self,
        config: GenerateConfig,
        target: Path,
        drafter: Path | None,
        prompts: Sequence[str],
        progress: Progress | None = None,
    ) -> None:
        self._decode = config.decode
        self._runtime = runtime_of(config.runtime, config.mesh)
        self.backend = self._runtime.backend
        self._tokenizer = Tokenizer.from_checkpoint(target)
        self._target = load_target(target, self._runtime, monitor=Monitor(progress))
        if (vocabulary := self._target.config.vocab_size) != self._tokenizer.vocab_size:
            raise KdjaxError(
                f"{target}: the tokenizer has {self._tokenizer.vocab_size} ids and the model {vocabulary}: "
                "put the tiktoken.model of this checkpoint there"
            )
        self._drafter = drafter and load_drafter(
            drafter,
            self._runtime,
            self._target.config,
            target_path=target,
            allow_mismatch=config.model.allow_mismatch,
            overrides=config.model.drafter_overrides,
        )
        stops = tuple(sorted(self._tokenizer.stop_token_ids | set(self._target.config.eos_token_ids)))
        self._requests = [
            Request(
                prompt_ids=tuple(self._encode(text, config)),
                max_new_tokens=config.decode.max_new_tokens,
                seed=config.decode.seed,
                stop_token_ids=stops,
            )
            for text in prompts
        ]

    @property
    def chain_note(self) -> str | None:
        """What to tell where a chain was asked for with a budget that it cannot use."""
        if self._decode.mode != "chain" or self._drafter is None:
            return None
        depth, budget = self._drafter.config.block_size - 1, self._decode.budget
        if budget <= depth:
            return None
        return f"kdjax: a chain drafts at most block_size - 1 = {depth} tokens: the budget is {depth}, not {budget}"

    def decode(self, mode: str, live: Live | None, interrupt: Interrupt) -> Outcome:
        """All prompts in one mode, shown on `live` as they grow.

        What Ctrl-C cuts short keeps the tokens so far and has `finish_reason` None.
        """
        fields: dict[str, Any] = {name: getattr(self._decode, name) for name in DecodeConfig.__struct_fields__}
        fields["mode"] = mode
        slots = min(self._decode.slots, len(self._requests))
        decoder = Decoder(
            self._target,
            None if mode == "autoregressive" else self._drafter,
            DecodeConfig(**fields),
            self._runtime,
            slots=slots,
        )
        texts = [self._tokenizer.detokenizer() for _ in self._requests]
        so_far: dict[int, Completion] = {}
        slot_of: dict[int, int] = {}
        for commit in interrupt.iterate(decoder.stream(self._requests)):
            so_far[commit.request] = commit.so_far
            slot_of[commit.request] = commit.slot
            if live:
                live.write(commit.request, texts[commit.request].push(commit.token_ids))
                if commit.finish_reason:
                    live.finish(commit.request)
        order = range(len(self._requests))
        return Outcome([so_far.get(i) for i in order], [slot_of.get(i) for i in order])

    def _encode(self, text: str, config: GenerateConfig) -> list[int]:
        if not config.prompt.chat:
            return self._tokenizer.encode_prompt(text)
        system = [{"role": "system", "content": config.prompt.system}] if config.prompt.system else []
        messages = [*system, {"role": "user", "content": text}]
        return self._tokenizer.encode_chat(messages, thinking=config.prompt.thinking)
