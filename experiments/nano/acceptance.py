"""Acceptance of drafts after held-out prompts, with and without the outputs that loop."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kdjax.decode import Decoder, Request, Statistics, pool, tau_macro
from kdjax.errors import KdjaxError
from kdjax.evaluate.loops import is_loop
from kdjax.tokenizer import Tokenizer


class Output(msgspec.Struct, frozen=True):
    """One continuation. `round_bytes`: bytes of the tokens that verify rounds emitted; a stop token has none."""

    token_ids: tuple[int, ...]
    rounds: int
    emitted: int
    accepted_by_depth: tuple[int, ...]
    round_bytes: int
    loops: bool

    @property
    def statistics(self) -> Statistics:
        return Statistics(self.rounds, self.emitted, self.accepted_by_depth)


class Summary(msgspec.Struct, frozen=True):
    """Acceptance over several outputs; tau counts the bonus token, see `kdjax.decode.Statistics`."""

    prompts: int
    rounds: int
    tau_micro: float
    tau_macro: float
    acceptance_by_depth: tuple[float, ...]
    bytes_per_verify: float


def prompts(documents: Sequence[Sequence[int]], count: int, length: int) -> list[tuple[int, ...]]:
    """`count` runs of `length` tokens at evenly spaced places of the documents, none across a document's end.

    Raises KdjaxError where no document is that long.
    """
    usable = [d for d in documents if len(d) >= length]
    if not usable:
        raise KdjaxError(f"no held-out document has {length} tokens: lower evaluate.prompt_len")
    ends = np.cumsum([len(d) for d in usable])
    places = np.linspace(0, ends[-1], count, endpoint=False).astype(int)
    chosen = []
    for place in places:
        i = int(np.searchsorted(ends, place, side="right"))
        document = usable[i]
        start = min(place - (ends[i] - len(document)), len(document) - length)
        chosen.append(tuple(int(t) for t in document[start : start + length]))
    return chosen


def measure(
    decoder: Decoder, tokenizer: Tokenizer, prompts: Sequence[tuple[int, ...]], new_tokens: int, seed: int
) -> list[Output]:
    """Continues every prompt by `new_tokens` or to a stop token; prompt i draws with seed `seed` + i."""
    stops = tuple(sorted(tokenizer.stop_token_ids))
    requests = [
        Request(prompt_ids=p, max_new_tokens=new_tokens, seed=seed + i, stop_token_ids=stops)
        for i, p in enumerate(prompts)
    ]
    return [
        Output(
            completion.token_ids,
            *completion.statistics,
            sum(len(tokenizer.token_bytes(t)) for t in completion.token_ids[1:] if t < tokenizer.base),
            is_loop(completion.token_ids),
        )
        for completion in decoder.generate(requests)
    ]


def summary(outputs: Sequence[Output]) -> Summary | None:
    """None without any output."""
    if not outputs:
        return None
    statistics = [o.statistics for o in outputs]
    total = pool(statistics)
    return Summary(
        prompts=len(outputs),
        rounds=total.rounds,
        tau_micro=total.tau,
        tau_macro=tau_macro(statistics),
        acceptance_by_depth=total.acceptance_by_depth,
        bytes_per_verify=sum(o.round_bytes for o in outputs) / max(total.rounds, 1),
    )
