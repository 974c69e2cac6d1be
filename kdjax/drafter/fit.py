"""Whether a drafter belongs to a target."""

from __future__ import annotations

from kdjax.config import DrafterConfig, ModelConfig
from kdjax.errors import KdjaxError


def check_fit(drafter: DrafterConfig, target: ModelConfig) -> None:
    """The drafter reads the target's embeddings, taps and lm_head, so their sizes have to agree.

    Raises:
        KdjaxError: hidden size, vocabulary or layer count differ, or the mask token is not in the vocabulary.
    """
    pairs = {
        "hidden_size": (drafter.hidden_size, target.hidden_size),
        "vocab_size": (drafter.vocab_size, target.vocab_size),
        "num_target_layers": (drafter.num_target_layers, target.num_hidden_layers),
    }
    if different := [
        f"{key} {ours} for the target's {theirs}" for key, (ours, theirs) in pairs.items() if ours != theirs
    ]:
        raise KdjaxError(f"the drafter has {', '.join(different)}: use the drafter that was trained for this target")
    if drafter.mask_token_id >= target.vocab_size:
        raise KdjaxError(
            f"the drafter's mask_token_id {drafter.mask_token_id} is outside the vocabulary of {target.vocab_size}: "
            "use the drafter that was trained for this target"
        )
