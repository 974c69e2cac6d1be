"""Benchmarks that are answered in words: one evaluation for all of them, with and without speculation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from kdjax.config.decode import AtLeast1, DecodeConfig
from kdjax.config.generate import ModelSection, RuntimeSection
from kdjax.config.mesh import ONE_DEVICE, MeshConfig
from kdjax.decode import Request
from kdjax.decode.completion import pool
from kdjax.errors import KdjaxError
from kdjax.evaluate import workbench
from kdjax.evaluate.acceptance import TAU
from kdjax.evaluate.benchmarks import parity, questions
from kdjax.evaluate.benchmarks.answers import without_thinking
from kdjax.evaluate.benchmarks.code import pass_at_k
from kdjax.evaluate.benchmarks.task import Style, Task
from kdjax.evaluate.completions import Answer, Ask, complete, stopping
from kdjax.run.experiment import Inputs, Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import Metric

METRICS = {
    "accuracy": Metric(total="correct", share=True, definition="share of questions that are answered right"),
    "pass_at_1": Metric(total="pass_at_1", definition="share of samples that are right, mean over questions"),
    "pass_at_k": Metric(
        total="pass_at_k", definition="chance that at least one of k samples is right, 1 - C(n-c, k) / C(n, k)"
    ),
    "truncated": Metric(total="truncated", definition="share of answers whose thinking had not ended at new_tokens"),
} | TAU


class PromptSection(questions.ShotsSection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`style` "chat" asks in one user turn, "base" has the text continued after `shots` solved examples.

    `thinking` is for chat only.
    """

    style: Style = "base"
    thinking: bool = False

    def __post_init__(self) -> None:
        if self.style == "base" and self.thinking:
            raise KdjaxError("thinking = true needs style = chat: a base prompt has no place to think")
        if self.style == "chat" and self.shots:
            raise KdjaxError(f"shots = {self.shots} needs style = base: chat prompts hold the question alone")


class Config(questions.Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`slots` questions at once, each answered `samples` times with up to `new_tokens`.

    The noise of `seed` differs by question and sample. With several samples pass@1 and, for `k`, pass@k take the place
    of accuracy.
    """

    model: ModelSection = ModelSection()
    decode: DecodeConfig = DecodeConfig()
    prompt: PromptSection = PromptSection()
    runtime: RuntimeSection = RuntimeSection()
    mesh: MeshConfig = ONE_DEVICE
    new_tokens: AtLeast1 = 1024
    samples: AtLeast1 = 1
    k: AtLeast1 = 1
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    slots: AtLeast1 = 8

    def __post_init__(self) -> None:
        if self.samples > 1 and self.decode.temperature == 0:
            raise KdjaxError(f"samples = {self.samples} at temperature 0 are all the same: set decode.temperature")
        if self.k > self.samples:
            raise KdjaxError(f"k = {self.k} exceeds samples = {self.samples}: raise samples")


class Question(NamedTuple):
    """`text` is the rendered prompt; there is a request for each sample."""

    name: str
    item: Any
    text: str
    asks: tuple[Ask, ...]


class Evaluation:
    """The evaluation of one task: what its module offers to the runner."""

    def __init__(self, task: Task) -> None:
        self._task = task
        flags = {name: Metric(total=name, definition=definition) for name, definition in task.flags.items()}
        self.METRICS = METRICS | flags
        self._flags = ("truncated", *task.flags)

    def inputs(self, config: Config) -> Inputs:
        """Raises KdjaxError where a file or a checkpoint is missing, or answers could not be graded."""
        self._task.ready(config)
        questions.asked(self._task, config)
        models = workbench.inputs(
            config.model,
            config.runtime,
            config.decode,
            mesh=config.mesh,
            needs_drafter=config.decode.mode != "autoregressive",
        )
        shots = questions.shots_file(self._task, config.prompt, self._shots(config))
        files = {self._task.name: Path(config.path)} | ({"shots": shots} if shots else {})
        return Inputs(models.checkpoints, files, models.backend)

    def units(self, config: Config) -> list[str]:
        return list(questions.asked(self._task, config))

    def measure(self, config: Config, units: Sequence[str]) -> Iterator[Record]:
        """The records of `units` as their answers come."""
        self._task.ready(config)
        found = self._questions(config)
        wanted = [found[unit] for unit in units]
        asks = [ask for question in wanted for ask in question.asks]
        # of all questions: a run that continues has the same program
        context = workbench.context_for([ask.request for question in found.values() for ask in question.asks])
        decode = stopping(config.decode) if any(ask.stops for ask in asks) else config.decode
        decoder = workbench.decoder(config.model, config.runtime, decode, config.slots, context, config.mesh)
        tokenizer = workbench.model(config.model, config.runtime, config.mesh).tokenizer
        answers: list[dict[int, Answer]] = [{} for _ in wanted]
        for at, answer in complete(decoder, tokenizer, asks):
            number, sample = divmod(at, config.samples)
            answers[number][sample] = answer
            if len(answers[number]) == config.samples:
                yield self._record(config, wanted[number], [answers[number][i] for i in range(config.samples)])

    def conclude(self, results: Sequence[Result]) -> list[str]:
        return parity.conclude(results)

    def draw(self, results: Sequence[Result], figure: Any) -> None:
        parity.draw(results, figure, self._task.name)

    def _shots(self, config: Config) -> int:
        if config.prompt.style == "chat":
            return 0
        return self._task.shots if config.prompt.shots is None else config.prompt.shots

    def _questions(self, config: Config) -> dict[str, Question]:
        """By name. Raises KdjaxError where a question is among the examples, or there are too few of these."""
        wanted = self._shots(config)
        shots = questions.solved(self._task, config.prompt, wanted)[:wanted]
        if len(shots) < wanted:
            raise KdjaxError(f"{config.prompt.shots_path} has {len(shots)} of {wanted} prompt.shots: lower them")
        models = workbench.model(config.model, config.runtime, config.mesh)
        stop_ids = tuple(sorted(models.tokenizer.stop_token_ids | set(models.target.config.eos_token_ids)))
        found = {}
        for name, (index, item) in questions.asked(self._task, config).items():
            questions.not_among(shots, name, item)
            prompt = self._task.prompt(item, shots, config.prompt.style)
            if config.prompt.style == "chat":
                turns = [{"role": "user", "content": prompt.text}]
                text = models.tokenizer.template.render(turns, thinking=config.prompt.thinking)
                ids = models.tokenizer.encode(text, special=True)
            else:
                text, ids = prompt.text, models.tokenizer.encode_prompt(prompt.text)
            requests = [
                Request(
                    prompt_ids=tuple(ids),
                    max_new_tokens=config.new_tokens,
                    seed=(config.seed + index * config.samples + sample) % 2**32,
                    stop_token_ids=stop_ids,
                )
                for sample in range(config.samples)
            ]
            _check_fits(name, requests[0], models.target.config.max_position_embeddings)
            found[name] = Question(name, item, text, tuple(Ask(request, prompt.stops) for request in requests))
        return found

    def _record(self, config: Config, question: Question, answers: Sequence[Answer]) -> Record:
        samples = [self._sample(config, question.item, answer) for answer in answers]
        statistics = pool([answer.completion.statistics for answer in answers])
        record: Record = {
            "unit": question.name,
            "thinking": config.prompt.thinking,
            "prompt_sha256": hashlib.sha256(question.text.encode()).hexdigest(),
            **{name: sum(sample[name] for sample in samples) / len(samples) for name in self._flags},
            "samples": samples,
            "rounds": statistics.rounds,
            "emitted": statistics.emitted,
            "accepted_by_depth": list(statistics.accepted_by_depth),
            "timings": {
                "prefill_s": sum(answer.completion.timings.prefill for answer in answers),
                "decode_s": sum(answer.completion.timings.decode for answer in answers),
            },
        }
        correct = sum(sample["correct"] for sample in samples)
        if config.samples == 1:
            record["correct"] = correct
        else:
            record["pass_at_1"] = correct / config.samples
            record["pass_at_k"] = pass_at_k(config.samples, correct, config.k)
        return record | ({"tau": statistics.tau} if statistics.rounds else {})

    def _sample(self, config: Config, item: Any, answer: Answer) -> dict[str, Any]:
        """Unfinished thinking is no answer: it counts as truncated, and is not graded."""
        text = without_thinking(answer.text, thinking=config.prompt.thinking)
        said = {"output": answer.text, "finish_reason": answer.finish_reason}
        none = dict.fromkeys(("correct", *self._flags), False) | {"truncated": text is None}
        return said | none | ({} if text is None else self._task.grade(config, item, text))


def _check_fits(name: str, request: Request, limit: int) -> None:
    prompt = len(request.prompt_ids)
    if prompt + request.max_new_tokens > limit:
        raise KdjaxError(
            f"question {name!r}: {prompt} prompt tokens and new_tokens = {request.max_new_tokens} exceed the model's "
            f"context of {limit}: lower new_tokens or prompt.shots"
        )
