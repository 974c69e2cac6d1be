"""Where decoding modes part although each follows the target: at scores equal but for float32 rounding."""

from __future__ import annotations

import msgspec

from kdjax.evaluate.divergence import ROUNDING


class Parting(msgspec.Struct, frozen=True):
    """Two modes chose other tokens after the same text: where, and how far apart the scores are in float64."""

    temperature: float
    domain: str
    prompt: int
    after: int
    tokens: tuple[int, int]
    gap: float

    @property
    def is_rounding(self) -> bool:
        return self.gap < ROUNDING
