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
        if self.drafter is not None:
            check_pair(self.target, self.drafter)


def check_pair(target: ModelConfig, drafter: DrafterConfig, *, allow_mismatch: bool = False) -> None:
    """Raises KdjaxError where a drafter is not made for a target.

    `allow_mismatch` leaves only what cannot run at all: another width, or layers or a mask row that do not exist.
    """
    runs = (
        ("hidden_size", drafter.hidden_size, target.hidden_size, drafter.hidden_size == target.hidden_size),
        (
            "num_hidden_layers",
            drafter.num_target_layers,
            target.num_hidden_layers,
            max(drafter.target_layer_ids, default=0) < target.num_hidden_layers,
        ),
        ("vocab_size", drafter.vocab_size, target.vocab_size, drafter.mask_token_id < target.vocab_size),
    )
    for name, mine, theirs, can_run in runs:
        if mine != theirs and not (allow_mismatch and can_run):
            raise KdjaxError(
                f"the drafter is made for a target of {name} {mine}, but target.{name} = {theirs}: "
                "use the drafter that was trained for this target" + (" (or allow the mismatch)" if can_run else "")
            )
