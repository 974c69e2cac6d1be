"""The whole decode loop, one stream: plain, DFlash chain or DDTree (DDTree paper, section 3 and its algorithm).

One loop serves all three. A round verifies [root, nodes] in one target forward: no nodes is plain decoding, one path is
DFlash, a tree is DDTree. The root is the newest token the target chose; it is committed when it is verified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float64

from kdjax.config import DrafterConfig, ModelConfig
from kdjax.errors import KdjaxError
from kdjax.reference import drafter as dflash
from kdjax.reference import model
from kdjax.reference.accept import accept
from kdjax.reference.sampling import Sampling, sample
from kdjax.reference.tree import Tree, chain, heap_tree, marginals, position_ids, visibility

Mode = Literal["autoregressive", "chain", "tree"]
Params = dict[Any, Any]


class Target(NamedTuple):
    """Config and float64 params, as `kdjax.reference.checkpoint.read_target` returns them."""

    config: ModelConfig
    params: Params


@runtime_checkable
class Proposer(Protocol):
    """Where draft distributions come from. `taps` holds the layers whose streams it wants to see."""

    taps: tuple[int, ...]

    def propose(
        self, root: int, start: int, new_taps: Float64[np.ndarray, "m taps"]
    ) -> Float[np.ndarray, "depth vocab"]:
        """Logits of positions start + 1 ..., `root` standing at `start`; `new_taps` are of the m tokens before it."""
        ...


class DFlash:
    """Proposes with a drafter, whose context rows grow by the tokens of each commit."""

    def __init__(self, config: DrafterConfig, params: Params, target: Target) -> None:
        self.config, self.params, self.target = config, params, target
        self.taps = config.target_layer_ids
        self.context = dflash.empty_context(config)

    def propose(
        self, root: int, start: int, new_taps: Float64[np.ndarray, "m taps"]
    ) -> Float[np.ndarray, "depth vocab"]:
        """See `Proposer`."""
        positions = np.arange(start - len(new_taps), start)
        self.context = self.context.extended(dflash.context(self.params, self.config, new_taps, positions))
        block = np.array([root] + [self.config.mask_token_id] * (self.config.block_size - 1))
        embeddings = self.target.params["embed_tokens"]["weight"][block]
        hidden = dflash.draft(self.params, self.config, embeddings, start, self.context)
        return model.logits(self.target.params, hidden[1:])


@dataclasses.dataclass(frozen=True)
class Round:
    """One verify step. `accepted` are rows of the verify forward (0 = root), `bonus` is the next round's root."""

    start: int
    root: int
    tree: Tree
    accepted: list[int]
    bonus: int
    draft_logits: Float[np.ndarray, "depth vocab"] | None
    verify_logits: Float64[np.ndarray, "rows vocab"]

    @property
    def committed(self) -> list[int]:
        """Tokens of the accepted rows, root first; the bonus is the next round's."""
        return [self.root] + [self.tree.tokens[row - 1] for row in self.accepted[1:]]


@dataclasses.dataclass(frozen=True)
class Generation:
    """`token_ids` end with the stop token when `finish_reason` is "stop"."""

    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    rounds: list[Round]


def generate(
    target: Target,
    proposer: Proposer | None,
    prompt: Sequence[int],
    max_new_tokens: int,
    mode: Mode,
    budget: int = 0,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    seed: int = 0,
    stop_token_ids: Sequence[int] = (),
) -> Generation:
    """Decodes until a stop token or exactly `max_new_tokens`, whichever comes first.

    `budget` counts tree nodes without the root. `proposer` may be None in mode "autoregressive". All modes give the
    same tokens: every row of a verify forward samples with the noise of its own absolute position.

    Raises:
        KdjaxError: on an empty prompt, a limit below 1, or NaN logits.
    """
    if not len(prompt) or max_new_tokens < 1:
        raise KdjaxError(f"{len(prompt)} prompt tokens and max_new_tokens={max_new_tokens}: give at least one of each")
    stops, prompt_length = set(stop_token_ids), len(prompt)
    taps = proposer.taps if proposer else ()

    def choose(logits: np.ndarray, position: int) -> int:
        return sample(logits, sampling, seed, position)

    out = model.forward(
        target.params, target.config, np.array(prompt), np.arange(prompt_length), model.empty_cache(target.config)
    )
    cache, new_taps = out.cache, out.taps(taps)
    start = prompt_length
    root = choose(model.logits(target.params, out.hidden[-1:])[0], start)

    rounds: list[Round] = []
    while start < prompt_length + max_new_tokens and not stops & {root, *_committed(rounds[-1:])}:
        draft_logits = None
        nodes = Tree([], [-1], [0], [], [])
        if mode != "autoregressive":
            assert proposer is not None
            draft_logits = proposer.propose(root, start, new_taps)
            nodes = chain(draft_logits) if mode == "chain" else heap_tree(*marginals(draft_logits, budget), budget)

        positions = position_ids(nodes, start)
        out = model.forward(
            target.params, target.config, np.array([root, *nodes.tokens]), positions, cache, visibility(nodes.parents)
        )
        verify_logits = model.logits(target.params, out.hidden)
        posterior = [choose(row, int(position) + 1) for row, position in zip(verify_logits, positions, strict=True)]
        walk = accept(nodes.tokens, nodes.parents, posterior)

        cache = np.concatenate([cache, out.cache[:, start:][:, walk.rows]], axis=1)
        new_taps = out.taps(taps)[walk.rows]
        rounds.append(Round(start, root, nodes, walk.rows, walk.bonus, draft_logits, verify_logits))
        start, root = start + len(walk.rows), walk.bonus

    tokens = [*_committed(rounds), root][:max_new_tokens]
    for i, token in enumerate(tokens):
        if token in stops:
            return Generation(tokens[: i + 1], "stop", rounds)
    return Generation(tokens, "length", rounds)


def _committed(rounds: list[Round]) -> list[int]:
    return [token for round_ in rounds for token in round_.committed]
