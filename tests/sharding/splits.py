"""The splits of the golden cases over eight devices: which are possible, and what the others must say."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest

from kdjax.checkpoint import read_model_config
from kdjax.config import MeshConfig, ModelConfig
from tests.oracles import HERE, SHARED


def splits(most: int = 8) -> list[MeshConfig]:
    """Every tensor, expert and tensor x expert split of up to `most` devices but the one of one device."""
    found = []
    for expert, tensor in itertools.product(range(1, most + 1), repeat=2):
        if 1 < expert * tensor <= most and {expert, tensor} <= {1, 2, 3, 4, 8}:
            found.append(MeshConfig(tensor=tensor, expert=expert))
            if expert > 1:
                found.append(MeshConfig(tensor=tensor, expert=expert, outside_experts="replicated"))
    return found


def is_legal(config: ModelConfig, mesh: MeshConfig) -> bool:
    """By arithmetic on the config alone, to be compared with what the table does."""
    dense = mesh.tensor * (mesh.expert if mesh.outside_experts == "sharded" else 1)
    inner, group = config.moe_intermediate_size, 1 if config.experts_int4 is None else config.experts_int4.group_size
    whole = [config.num_attention_heads, config.vocab_size, config.intermediate_size, inner * config.n_shared_experts]
    return (
        all(size % dense == 0 for size in whole)
        and config.n_routed_experts % mesh.expert == 0
        and inner % (mesh.tensor * group) == 0
    )


def possible(cases: Sequence[str]) -> list[tuple[str, MeshConfig]]:
    """The legal splits of the target cases that this machine has."""
    folders = {case: root / case for root in (SHARED, HERE) for case in cases if (root / case).is_dir()}
    configs = {case: read_model_config(folders[case] / "checkpoint") for case in cases if case in folders}
    return [(case, mesh) for case, config in configs.items() for mesh in splits() if is_legal(config, mesh)]


def some(meshes: Iterable[MeshConfig], default: Sequence[MeshConfig]) -> list:
    """All of `meshes`, but without -m full only those of `default`: every mesh is a compilation of its own."""
    return [pytest.param(m, marks=() if m in default else pytest.mark.full, id=name(m)) for m in meshes]


def name(value: object) -> str | None:
    if not isinstance(value, MeshConfig):
        return None
    repeated = "-repeated" if value.outside_experts == "replicated" else ""
    sequence = f"-sp{value.sequence}" if value.sequence > 1 else ""
    return f"tp{value.tensor}-ep{value.expert}{sequence}{repeated}"
