"""Golden data from third-party code: small copies in `tests/data`, the full set in `../shared/oracles` when present."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors.numpy needs
import numpy as np
import pytest
from safetensors.numpy import load_file

HERE = pathlib.Path(__file__).parent / "data"
SHARED = pathlib.Path(__file__).parents[2] / "shared" / "oracles"


class Oracle(NamedTuple):
    path: pathlib.Path
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    meta: dict[str, Any]

    @property
    def checkpoint(self) -> pathlib.Path:
        return self.path / "checkpoint"


def find(name: str) -> pathlib.Path:
    """The folder of a case; skips the test, with the reason, where this machine does not have it."""
    for root in (HERE, SHARED):
        if (root / name).is_dir():
            return root / name
    pytest.skip(f"oracle {name} is not in tests/data and ../shared/oracles is absent")


@functools.cache
def load(name: str) -> Oracle:
    path = find(name)

    def tensors(stem: str) -> dict[str, np.ndarray]:
        file = path / f"{stem}.safetensors"
        return load_file(file) if file.exists() else {}

    meta = path / "expected.json"
    return Oracle(path, tensors("inputs"), tensors("expected"), json.loads(meta.read_text()) if meta.exists() else {})


HF_K2 = ("hf_k2_a", "hf_k2_b")
DFLASH = (
    "dflash_full_yarn",
    "dflash_full_deepseek_yarn",
    "dflash_swa_causal",
    "dflash_swa_short_context",
    "dflash_swa_is_causal_false",
)
DDTREE_LOGITS = tuple(
    f"ddtree_{name}"
    for name in (
        "all_equal bf16_ties equal_depths equal_depths_bf16 integer_logits large_offset onehot_ties peaky "
        "permuted_depths single_depth small_vocab smooth vocab163840"
    ).split()
)
DDTREE_TABLE = tuple(
    f"ddtree_table_{name}" for name in "full_mantissa_alternating full_mantissa_same one_ulp_apart tiny_values".split()
)
DDTREE = DDTREE_LOGITS + DDTREE_TABLE
BUDGETS = (1, 4, 7, 8, 16, 22, 32, 64)
ROPE = ("rope_target_tiny", "rope_target_k26", "rope_drafter_k26", "rope_drafter_amplitude_knob")
MOE_GATE = tuple(
    f"moe_gate_{name}"
    for name in (
        "exact_tie k26_random large_bias mixed_range near_ties negative_scores saturated small_16_top4 underflow"
    ).split()
)
E2E_TEACHER = ("e2e_teacher_p0", "e2e_teacher_p2")
E2E = ("e2e_random_drafter_p0", *E2E_TEACHER)
E2E_RUNS = [(name, run) for name in E2E for run in ("0", "4", "8", "16", "chain")] + [(E2E[0], "64")]


class Prompt(NamedTuple):
    """One prompt of a target case; `rows` are the positions with stored logits, embeddings and residuals."""

    name: str
    input_ids: np.ndarray
    rows: np.ndarray
    expected: dict[str, np.ndarray]

    def by_layer(self, quantity: str) -> dict[int, np.ndarray]:
        prefix = f"{quantity}."
        return {int(k.removeprefix(prefix)): v for k, v in self.expected.items() if k.startswith(prefix)}


def prompts(case: Oracle) -> list[Prompt]:
    """The prompts p0, p1, p2 of a hf_k2 case."""
    return [
        Prompt(
            name,
            case.expected[f"{name}.input_ids"],
            case.expected[f"{name}.rows"],
            {k.removeprefix(f"{name}."): v for k, v in case.expected.items() if k.startswith(f"{name}.")},
        )
        for name in ("p0", "p1", "p2")
    ]


class DraftStep(NamedTuple):
    """One step of a drafter case: `target_hidden` are the taps of the new tokens, which `start` already counts."""

    start: int
    target_hidden: np.ndarray
    block_ids: np.ndarray
    embedding: np.ndarray
    expected: dict[str, np.ndarray]


def draft_steps(case: Oracle) -> list[DraftStep]:
    return [
        DraftStep(
            step["start"],
            case.inputs[f"s{i}.target_hidden"],
            case.inputs[f"s{i}.block_ids"],
            case.inputs[f"s{i}.noise_embedding"],
            {k.removeprefix(f"s{i}."): v for k, v in case.expected.items() if k.startswith(f"s{i}.")},
        )
        for i, step in enumerate(case.meta["steps"])
    ]


def yarn_parameters(case: Oracle) -> tuple[float, dict[str, Any]]:
    """theta and the YarnConfig fields of a rope case; without mscale keys the amplitude is the one it records."""
    parameters = dict(case.meta["parameters"])
    theta = parameters.pop("rope_theta")
    if "mscale" not in parameters:
        parameters["attention_factor"] = case.meta["cos_sin_amplitude"]
    return theta, parameters


def runs(case: Oracle) -> dict[str, dict[str, Any]]:
    """The recorded runs of an e2e case by key: a budget, or "chain"."""
    return case.meta["runs"]


def tree_is_determined(round_: dict[str, Any]) -> bool:
    """Whether the tree of a recorded round survives float32 noise in the draft logits.

    It does if all scores came from one stored table (no gaps recorded: a chain or a root), or if successive scores are
    further apart than two correct implementations are; a tie between nodes of a stored table is exact, hence 0 passes.
    """
    gap = round_.get("min_gap_between_successive_scores")
    return gap is None or gap == 0 or gap > 1e-4


def round_logits(case: Oracle, run: str, round_: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Draft [depth, vocab] and verify [rows, vocab] logits (root first), stored for three rounds of 16 and chain."""
    prefix = f"b{run}.round{round_}"
    if f"{prefix}.draft_logits" not in case.expected:
        return None
    return case.expected[f"{prefix}.draft_logits"], case.expected[f"{prefix}.verify_logits"]
