"""Golden cases: decoded by the NumPy reference, and compared with what JAX decodes from the same weights."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from kdjax.checkpoint import load_drafter, load_target
from kdjax.checkpoint.bundle import Bundle, Case
from kdjax.config import DecodeConfig
from kdjax.decode import Completion, Decoder, Request
from kdjax.errors import KdjaxError
from kdjax.evaluate.divergence import first_difference, margins
from kdjax.evaluate.forward import Forward
from kdjax.model.runtime import Runtime
from kdjax.reference import loop as reference_loop
from kdjax.reference import model as reference
from kdjax.reference.checkpoint import read_drafter, read_target

Mode = Literal["autoregressive", "tree"]


def decode_cases(
    target: str | pathlib.Path,
    drafter: str | pathlib.Path | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    tree_budget: int,
) -> Iterator[Case]:
    """Greedy tokens of each prompt from the float64 reference, without stop tokens.

    Raises:
        KdjaxError: a prompt is empty or has a token outside the vocabulary.
    """
    model = reference_loop.Target(*read_target(target))
    draft = read_drafter(drafter) if drafter else None
    for prompt in prompts:
        if bad := [token for token in prompt if not 0 <= token < model.config.vocab_size]:
            raise KdjaxError(f"prompt token {bad[0]} is outside the vocabulary of {model.config.vocab_size} ids")
        plain = reference_loop.generate(model, None, prompt, max_new_tokens, "autoregressive")
        gaps = _reference_margins(model, prompt, plain.token_ids)
        if draft is None:
            yield Case(tuple(prompt), tuple(plain.token_ids), gaps)
            continue
        proposer = reference_loop.DFlash(*draft, model)
        tree = reference_loop.generate(model, proposer, prompt, max_new_tokens, "tree", tree_budget)
        accepted: list[int] = []
        for round_ in tree.rounds:
            # The first token is the prompt's; a round that starts with all tokens emitted is the reference's alone.
            if 1 + sum(accepted) < max_new_tokens:
                accepted.append(len(round_.accepted))
        yield Case(tuple(prompt), tuple(plain.token_ids), gaps, tuple(tree.token_ids), tuple(accepted))


def _reference_margins(model: reference_loop.Target, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[float, ...]:
    """Gaps between the two best logits where each token was chosen, from one causal forward over the text."""
    text = np.array([*prompt, *tokens[:-1]])
    out = reference.forward(model.params, model.config, text, np.arange(len(text)), reference.empty_cache(model.config))
    logits = reference.logits(model.params, out.hidden[len(prompt) - 1 :])
    return tuple(margins(logits).tolist())


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first token that differs: `position` counts new tokens from 0.

    `golden_margin` and `margin` are the gaps between the two best logits there, in the reference and here.
    """

    position: int
    golden_token: int
    golden_margin: float
    token: int
    margin: float


@dataclasses.dataclass(frozen=True)
class Result:
    """One case in one mode. `golden_rounds` and `rounds` say, for tree decoding, how many rounds accepted each depth.

    The first entry of both counts all rounds.
    """

    case: int
    mode: Mode
    tokens: int
    divergence: Divergence | None = None
    golden_rounds: tuple[int, ...] = ()
    rounds: tuple[int, ...] = ()

    def passes(self, tolerance: float = 0.0) -> bool:
        """Tokens and accepted drafts agree, or tokens part where both margins are below `tolerance`.

        With a tolerance above 0 accepted drafts may differ too: the drafter's near-ties have no margin on record.
        """
        if self.divergence is None:
            return tolerance > 0 or self.rounds == self.golden_rounds
        return max(self.divergence.golden_margin, self.divergence.margin) < tolerance


def check(bundle: Bundle, runtime: Runtime) -> Iterator[Result]:
    """Decode every case of the bundle with the JAX loops, one by one and, where there is a drafter, by trees.

    Raises:
        KdjaxError: the bundle's weights do not load, or the mesh of `runtime` cannot cut them.
    """
    with tempfile.TemporaryDirectory() as scratch:
        target_folder, drafter_folder = bundle.extract(scratch)
        target = load_target(target_folder, runtime)
        drafter = load_drafter(drafter_folder, runtime, target.config) if drafter_folder else None
    requests = [Request(prompt_ids=case.prompt, max_new_tokens=len(case.tokens)) for case in bundle.cases]
    forward = Forward(target, runtime, context=max(len(case.prompt) + len(case.tokens) for case in bundle.cases))
    modes: tuple[Mode, ...] = ("autoregressive", "tree") if drafter else ("autoregressive",)
    for mode in modes:
        config = DecodeConfig(mode=mode, budget=bundle.header.tree_budget if mode == "tree" else 0)
        decoder = Decoder(target, drafter if mode == "tree" else None, config, runtime, slots=len(requests))
        for index, (case, completion) in enumerate(zip(bundle.cases, decoder.generate(requests), strict=True)):
            golden = case.tokens if mode == "autoregressive" else case.tree_tokens
            yield Result(
                index,
                mode,
                len(golden),
                _divergence(forward, case, golden, completion),
                *(_rounds(case, completion) if mode == "tree" else ()),
            )


def _rounds(case: Case, completion: Completion) -> tuple[tuple[int, ...], tuple[int, ...]]:
    statistics = completion.statistics
    depths = range(len(statistics.accepted_by_depth) + 1)
    golden = tuple(sum(accepted > depth for accepted in case.tree_accepted) for depth in depths)
    return golden, (statistics.rounds, *statistics.accepted_by_depth)


def _divergence(forward: Forward, case: Case, golden: tuple[int, ...], completion: Completion) -> Divergence | None:
    position = first_difference(golden, completion.token_ids)
    if position is None:
        return None
    scores = forward.logits([*case.prompt, *golden[:position]])[-1]
    return Divergence(
        position=position,
        golden_token=golden[position],
        golden_margin=case.margins[position],
        token=completion.token_ids[position],
        margin=float(margins(scores)),
    )
