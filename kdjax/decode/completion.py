"""What decoding gives back: tokens, why they ended, how many drafts were accepted, how long it took."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "cancelled"]


class Statistics(NamedTuple):
    """Acceptance of one or several streams.

    `emitted` counts the tokens of verify rounds, bonus included; the first token of a stream comes from its prompt and
    belongs to no round. `accepted_by_depth[d]` counts the rounds that accepted the draft at depth d + 1, also where a
    stop or the limit then cut the round short.
    """

    rounds: int
    emitted: int
    accepted_by_depth: tuple[int, ...]

    @property
    def tau(self) -> float:
        """Tokens per verify round, bonus included (micro average); 0 without a round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """Share of the rounds which accepted depth d - 1 that also accepted depth d; 0 where there were none."""
        rounds = (self.rounds, *self.accepted_by_depth)
        return tuple(after / before if before else 0.0 for before, after in itertools.pairwise(rounds))


def pool(statistics: Sequence[Statistics]) -> Statistics:
    """Counts of several streams added up: its `tau` is the micro average. All have the same drafted depth."""
    by_depth = zip(*(s.accepted_by_depth for s in statistics), strict=True)
    return Statistics(sum(s.rounds for s in statistics), sum(s.emitted for s in statistics), tuple(map(sum, by_depth)))


def tau_macro(statistics: Sequence[Statistics]) -> float:
    """Mean of the streams' own tau, over those with at least one round; 0 without any."""
    own = [s.tau for s in statistics if s.rounds]
    return sum(own) / len(own) if own else 0.0


class Timings(NamedTuple):
    """Wall-clock seconds. `decode` is the time of decode calls while the stream was live, other slots' work included;
    `compile` is what the whole call spent waiting for the compiler, part of neither of the others. On a cold start the
    first `prefill` shares the machine with the compilation of the decode program."""

    prefill: float
    compile: float
    decode: float


class Completion(NamedTuple):
    """A stream from its first token on; `finish_reason` is None while it runs.

    "stop": its last token is one of the request's stop tokens; "length": it has `max_new_tokens`.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    statistics: Statistics
    timings: Timings


class Commit(NamedTuple):
    """Tokens that one call added to a stream, and the stream so far, whose `finish_reason` ends it.

    `slot` and `request` are numbers counted from 0; `request` is that of the sequence which was submitted.
    """

    slot: int
    request: int
    token_ids: tuple[int, ...]
    so_far: Completion

    @property
    def finish_reason(self) -> FinishReason | None:
        """That of the stream; None while it runs."""
        return self.so_far.finish_reason
