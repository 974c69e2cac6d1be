"""What decoding accepts of its settings, told from the two configs before a weight is read."""

from __future__ import annotations

import pathlib

from kdjax.checkpoint import read_drafter_config, read_model_config
from kdjax.config import DecodeConfig
from kdjax.tree import check_budget


def compiled_budget(config: DecodeConfig, depth: int, vocabulary: int) -> int:
    """Nodes that the programs of `config` are compiled for: 0 when autoregressive, at most `depth` in a chain.

    `depth` is how many tokens the drafter proposes at once, `vocabulary` the size of the target's.

    Raises:
        KdjaxError: the budget of a tree, or the depth, is too large.
    """
    if config.mode == "autoregressive":
        return 0
    if config.mode == "chain":
        return min(config.budget, depth)
    if config.budget:
        check_budget(depth, config.budget, vocabulary)
    return config.budget


def check_decoding(config: DecodeConfig, target: pathlib.Path, drafter: pathlib.Path | None) -> None:
    """Refuses what a decoder of these checkpoint folders would refuse once they are loaded.

    `drafter` None is for modes that draft nothing, which have no limit.

    Raises:
        KdjaxError: like `compiled_budget`; or one of the config.json is unusable.
    """
    if drafter is not None:
        depth = read_drafter_config(drafter).block_size - 1
        compiled_budget(config, depth, read_model_config(target).vocab_size)
