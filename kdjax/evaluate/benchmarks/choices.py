"""Benchmarks that are answered by the most likely of given continuations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from kdjax.bundled.locate import locate
from kdjax.config.decode import AtLeast1
from kdjax.config.generate import ModelSection, RuntimeSection
from kdjax.config.mesh import ONE_DEVICE, MeshConfig
from kdjax.errors import KdjaxError
from kdjax.evaluate import workbench
from kdjax.evaluate.benchmarks import parity, questions
from kdjax.evaluate.benchmarks.questions import Asking
from kdjax.evaluate.continuations import Continuation, ContinuationScorer, Tokens, encode_pair
from kdjax.model.runtime import runtime_of
from kdjax.run.experiment import Inputs, Result
from kdjax.run.ledger import Record
from kdjax.run.statistics import Metric
from kdjax.tokenizer import Tokenizer

ACCURACY = {
    "accuracy": Metric(total="correct", share=True, definition="share of questions whose most likely choice is right"),
}
NORMALISED = {
    "accuracy_normalised": Metric(
        total="correct_normalised",
        share=True,
        definition="the same where log-likelihoods are divided by the choices' characters",
    ),
}


class Config(questions.Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rows` texts per forward pass."""

    model: ModelSection = ModelSection()
    prompt: questions.ShotsSection = questions.ShotsSection()
    runtime: RuntimeSection = RuntimeSection()
    mesh: MeshConfig = ONE_DEVICE
    rows: AtLeast1 = 8


class Asked(NamedTuple):
    """`choices` are continuations of `context`; number `right` of them is expected."""

    context: str
    choices: Sequence[str]
    right: int


@runtime_checkable
class Task(Asking, Protocol):
    def shots_for(self, item: Any, examples: Sequence[Any]) -> list[Any]:
        """Those of the solved examples that may be shown before a question, in order."""
        ...

    def ask(self, item: Any, shots: Sequence[Any]) -> Asked: ...


class Evaluation:
    """The evaluation of one task: what its module offers to the runner. No token is decoded, so no mode matters."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def inputs(self, config: Config) -> Inputs:
        """Raises KdjaxError where a file or a checkpoint is missing."""
        questions.asked(self._task, config)
        target, _ = locate(config.model, needs_drafter=False)
        shots = questions.shots_file(self._task, config.prompt, self._shots(config))
        files = {self._task.name: Path(config.path)} | ({"shots": shots} if shots else {})
        return Inputs({"target": target}, files, runtime_of(config.runtime, config.mesh).backend)

    def units(self, config: Config) -> list[str]:
        return list(questions.asked(self._task, config))

    def measure(self, config: Config, units: Sequence[str]) -> Iterator[Record]:
        """The records of `units`, a batch at a time."""
        target, tokenizer, runtime = workbench.model(config.model, config.runtime, config.mesh)
        scorer = ContinuationScorer(target, runtime, rows=config.rows)
        found = self._asked(config)
        wanted = {unit: found[unit] for unit in units}
        encoded = {
            unit: [_encoded(tokenizer, asked.context, choice) for choice in asked.choices]
            for unit, asked in found.items()
        }
        longest = max(len(before) + len(after) for pairs in encoded.values() for before, after in pairs)
        pairs = [pair for unit in units for pair in encoded[unit]]
        owners = [(unit, at) for unit in units for at in range(len(encoded[unit]))]
        scores: dict[str, dict[int, Continuation]] = {unit: {} for unit in wanted}
        for index, continuation in scorer.scores(pairs, longest):
            unit, at = owners[index]
            scores[unit][at] = continuation
            if len(scores[unit]) == len(wanted[unit].choices):
                yield _record(unit, wanted[unit], [scores[unit][i] for i in range(len(scores[unit]))])

    def conclude(self, results: Sequence[Result]) -> list[str]:
        return parity.conclude(results)

    def draw(self, results: Sequence[Result], figure: Any) -> None:
        parity.draw(results, figure, self._task.name)

    def _shots(self, config: Config) -> int:
        return self._task.shots if config.prompt.shots is None else config.prompt.shots

    def _asked(self, config: Config) -> dict[str, Asked]:
        """By name. Raises KdjaxError where a question is among its examples, or there are too few of these."""
        wanted = self._shots(config)
        examples = questions.solved(self._task, config.prompt, wanted)
        found = {}
        for name, (_, item) in questions.asked(self._task, config).items():
            shots = self._task.shots_for(item, examples)[:wanted]
            if len(shots) < wanted:
                raise KdjaxError(
                    f"{config.prompt.shots_path} has {len(shots)} of {wanted} prompt.shots for the question {name!r}: "
                    "lower them"
                )
            questions.not_among(shots, name, item)
            found[name] = self._task.ask(item, shots)
        return found


def _encoded(tokenizer: Tokenizer, context: str, choice: str) -> tuple[Tokens, Tokens]:
    before, after = encode_pair(tokenizer.encode, context, choice)
    return (*tokenizer.prompt_prefix, *before), after


def _record(unit: str, asked: Asked, scores: Sequence[Continuation]) -> Record:
    log_p = np.array([score.log_likelihood for score in scores])
    characters = np.array([len(choice.strip()) for choice in asked.choices])
    choice, normalised = int(log_p.argmax()), int((log_p / characters).argmax())
    return {
        "unit": unit,
        "thinking": False,
        "prompt_sha256": hashlib.sha256(asked.context.encode()).hexdigest(),
        "correct": float(choice == asked.right),
        "correct_normalised": float(normalised == asked.right),
        "choice": choice,
        "expected": asked.right,
        "log_likelihoods": log_p.tolist(),
    }
