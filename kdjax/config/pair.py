"""The shapes of a target and its drafter without their weights (`configs/models/*.toml`)."""

from __future__ import annotations

from msgspec import Struct

from kdjax.config.model import DrafterConfig, ModelConfig
from kdjax.errors import KdjaxError


class ModelPair(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises KdjaxError where the two do not fit: the drafter reads the target's residual stream and its embeddings."""

    target: ModelConfig
    drafter: DrafterConfig | None = None

    def __post_init__(self) -> None:
        if self.drafter is None:
            return
        for name, mine in (
            ("hidden_size", self.drafter.hidden_size),
            ("vocab_size", self.drafter.vocab_size),
            ("num_hidden_layers", self.drafter.num_target_layers),
        ):
            if mine != (theirs := getattr(self.target, name)):
                raise KdjaxError(
                    f"the drafter is made for a target of {name} {mine}, but target.{name} = {theirs}: "
                    "use the drafter that was trained for this target"
                )
