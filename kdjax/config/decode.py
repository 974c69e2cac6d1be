"""How tokens are drafted and chosen."""

from __future__ import annotations

import math
import numbers
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kdjax.errors import KdjaxError

Mode = Literal["tree", "chain", "autoregressive"]
AtLeast0 = Annotated[int, Meta(ge=0)]
AtLeast1 = Annotated[int, Meta(ge=1)]


COLDEST = 1e-6
"""Below it, logits / T would leave the range of float32 and unequal logits would tie at infinity."""


def need_integers(where: str = "", /, **values: Any) -> None:
    """Raises KdjaxError for a value that is no integer, as what Python passes on may be."""
    _need(numbers.Integral, "an integer", where, values)


def _need(kind: type, article: str, where: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, kind):
            raise KdjaxError(f"{where}{name}={value!r} is of type {type(value).__name__}: give {article}")


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a token is chosen from logits. Hashable.

    Every filter looks at p = softmax(logits / temperature); what passes all of them is drawn by Gumbel-max.

    Attributes:
        temperature: 0 is greedy, else at least 1e-6.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the shortest list of most likely tokens whose mass reaches this; 1 keeps all.
        min_p: keep tokens of at least this share of the largest p; 0 keeps all.

    Raises:
        KdjaxError: a value out of range.
    """

    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_k: AtLeast0 = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0

    # The annotations hold for what is read from files; these checks for what is made in Python.
    def __post_init__(self) -> None:
        _need(numbers.Real, "a number", "", {name: getattr(self, name) for name in ("temperature", "top_p", "min_p")})
        need_integers(top_k=self.top_k)
        if not (0 <= self.temperature < math.inf):
            raise KdjaxError(f"temperature={self.temperature} must be finite and at least 0: 0 is greedy decoding")
        if 0 < self.temperature < COLDEST:
            raise KdjaxError(f"temperature={self.temperature} is below {COLDEST}: use 0 for greedy decoding")
        if self.top_k < 0:
            raise KdjaxError(f"top_k={self.top_k} is negative: use 0 to keep every token")
        if not (0 < self.top_p <= 1):
            raise KdjaxError(f"top_p={self.top_p} must lie in (0, 1]: use 1 to keep every token")
        if not (0 <= self.min_p <= 1):
            raise KdjaxError(f"min_p={self.min_p} must lie in [0, 1]: use 0 to keep every token")


class DecodeConfig(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a decode program is compiled for: every field is static. Hashable. The fields of `Sampling`, and:

    Attributes:
        mode: "tree" (DDTree), "chain" (plain DFlash) or "autoregressive".
        budget: tree nodes, the root not counted. A chain drafts min(budget, block_size - 1) tokens; autoregressive
            decoding none.
        rounds_per_call: verify rounds between two looks of the host: smaller streams more smoothly, larger wastes less.
        prefill_chunk: prompt tokens per forward, at most the context.

    Raises:
        KdjaxError: an unknown mode, or a value out of range.
    """

    mode: Mode = "tree"
    budget: AtLeast0 = 15
    rounds_per_call: AtLeast1 = 16
    prefill_chunk: AtLeast1 = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        need_integers(budget=self.budget, rounds_per_call=self.rounds_per_call, prefill_chunk=self.prefill_chunk)
        if self.mode not in ("tree", "chain", "autoregressive"):
            raise KdjaxError(f"mode={self.mode!r} is unknown: use tree, chain or autoregressive")
        if self.budget < 0:
            raise KdjaxError(f"budget={self.budget} is negative: use 0 for autoregressive decoding")
        for name in ("rounds_per_call", "prefill_chunk"):
            if (value := getattr(self, name)) < 1:
                raise KdjaxError(f"{name}={value} must be at least 1")
            if value >= 2**31:
                raise KdjaxError(f"{name}={value} must be below 2^31: lower it")

    @property
    def sampling(self) -> Sampling:
        """The fields of `Sampling` alone."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
