"""Configurations of the INT4 experts that are worth a try, and in which order."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallas_kernels.int4_experts.bench import Case
from pallas_kernels.int4_experts.config import Config, Grouping, Tile
from pallas_kernels.int4_experts.layout import padded
from pallas_kernels.int4_experts.triton import NARROW

ROWS_AND_WARPS = ((16, 1), (32, 1), (32, 2), (64, 2), (64, 4), (64, 8))


def gate_up_candidates(case: Case, base: Config, cores: int) -> Iterator[Config]:
    """Variations of grouping and gate+up; `base.down` follows where it has to."""
    used = float(np.mean([len(np.unique(r)) for r in case.routings]))
    density = case.tokens * case.shape.top_k / used
    for grouping, (rows, warps), tokens, count, stages, splits, scale_on in itertools.product(
        _groupings(case),
        ROWS_AND_WARPS,
        _token_tiles(density),
        (1, 2),
        (2, 3, 4, 5),
        (1, 2, 3, 4, 5, 7, 8, 14),
        ("sum", "weight"),
    ):
        programs = used * max(1, density / tokens) * padded(case.inner) / (rows * count) * splits
        warps_per_core = programs * warps / cores
        wide = rows * count * tokens / (warps * 32) > 64  # the accumulators of gate and up fill the registers
        few_or_many = warps_per_core < 1 or (splits > 1 and warps_per_core > 64)
        if wide or few_or_many or (scale_on == "weight" and tokens < 16) or (grouping == "row" and tokens > 8):
            continue
        gate_up = Tile(rows, tokens, warps, stages, count, splits, 1, scale_on)
        yield with_down(Config(grouping, base.down_form, gate_up, base.down), base.down)


def down_candidates(case: Case, base: Config) -> Iterator[Config]:
    """Variations of down, for the groups and partial sums that gate+up of `base` makes."""
    narrow = padded(case.inner) <= NARROW
    forms = ["group"] + (["token"] if narrow and case.tokens <= 64 else [])
    for form, (rows, warps), count, stages, steps, scale_on in itertools.product(
        forms, ROWS_AND_WARPS, (1, 2), (2, 3, 4, 5), (1, 2, 4, 7, 8, 14) if narrow else (1,), ("sum", "weight")
    ):
        tokens = base.gate_up.tokens if form == "group" else 8
        wide = rows * count * tokens / (warps * 32) > 64
        if wide or (form == "token" and (steps > 1 or scale_on == "weight")) or (scale_on == "weight" and tokens < 16):
            continue
        down = Tile(rows, tokens, warps, stages, count, 1, steps, scale_on)
        yield dataclasses.replace(base, down_form=form, down=down)


def with_down(config: Config, down: Tile) -> Config:
    """`config` with `down` for the groups that its gate+up makes."""
    tokens = config.gate_up.tokens if config.down_form == "group" else 8
    return dataclasses.replace(config, down=dataclasses.replace(down, tokens=tokens))


def _groupings(case: Case) -> list[Grouping]:
    assignments = case.tokens * case.shape.top_k
    fits: dict[Grouping, bool] = {
        "row": assignments <= 160,
        "scan": 24 < assignments <= 528,
        "align": assignments > 128,
    }
    return [name for name, possible in fits.items() if possible]


def _token_tiles(density: float) -> Sequence[int]:
    """About as many as an expert has."""
    return [t for t in (8, 16, 32, 64, 128) if density / 5 <= t <= max(8, 3 * density)] or [8]


class Waiting:
    """Candidates from which the nearest to the best so far are taken, equals in random order."""

    def __init__(self, configs: Sequence[Config], rng: random.Random) -> None:
        different = list(dict.fromkeys(configs))
        self._waiting = [(config, _traits(config)) for config in rng.sample(different, len(different))]

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, best: Config) -> Config:
        """One that differs from `best` in the fewest ways."""
        traits = _traits(best)
        ways = [sum(a != b for a, b in zip(theirs, traits, strict=True)) for _, theirs in self._waiting]
        return self._waiting.pop(ways.index(min(ways)))[0]


def _traits(config: Config) -> tuple[Any, ...]:
    """Rows and warps count as one, and so does what a number of tokens entails."""
    tiles = (
        ((t.rows, t.warps), t.stages, t.count, t.splits, t.steps, t.scale_on) for t in (config.gate_up, config.down)
    )
    return config.grouping, config.down_form, config.gate_up.tokens, *itertools.chain(*tiles)
