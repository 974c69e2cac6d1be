"""Last stage: how training went and what it led to, as one picture and one file of curves."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

from experiments.nano.config import NanoConfig, Phase
from kdjax.errors import KdjaxError

GROUP_COLORS = {"python": "tab:blue", "docs": "tab:orange", "prose": "tab:green"}
CELL_STYLES = {"chain-7-T0": "--", "tree-15-T0": "-"}


def run(config: NanoConfig, folder: pathlib.Path) -> None:
    """Reads `metrics.jsonl` of both runs and `evaluation.json`; writes `training.jsonl` and `curves.png` in `folder`.

    Raises KdjaxError where one of them, or matplotlib, is missing.
    """
    training = {stage: _read(folder / stage / "metrics.jsonl", stage) for stage in ("target", "drafter")}
    (evaluation,) = _read(folder / "evaluation.json", "evaluate", lines=False)
    with (folder / "training.jsonl").open("w") as file:
        for stage, records in training.items():
            file.writelines(json.dumps({"stage": stage, **_rounded(record)}) + "\n" for record in records)
    draw(config, training, evaluation, folder / "curves.png")


def draw(
    config: NanoConfig, training: dict[str, list[dict[str, Any]]], evaluation: dict[str, Any], out: pathlib.Path
) -> None:
    """Three panels: target loss, accuracy of the draft slots while training, acceptance by depth at T = 0."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KdjaxError('matplotlib is not installed: pip install -e ".[plots]"') from error
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)

    steps = [r for r in training["target"] if "loss" in r]
    left.plot([r["step"] for r in steps], [r["loss"] / math.log(2) for r in steps])
    left.set(title="target", xlabel="step", ylabel="training loss, bits per token", ylim=(1.8, 4))
    _mark_phases(left, steps, config.train_target.phases)

    steps = [r for r in training["drafter"] if "loss" in r]
    for slot in (1, 3, 7):
        middle.plot([r["step"] for r in steps], [r[f"slot{slot}"] for r in steps], label=f"slot {slot}")
    middle.set(title="drafter", xlabel="step", ylabel="agreement with the target, training text", ylim=(0, 1))
    middle.locator_params(axis="x", nbins=5)
    _mark_phases(middle, steps, config.train_drafter.train.phases)
    middle.legend(loc="lower center", ncols=3)

    for cell, style in CELL_STYLES.items():
        for group, color in GROUP_COLORS.items():
            summary = evaluation["acceptance"].get(cell, {}).get(group, {}).get("without_loops")
            if summary:
                shares = summary["acceptance_by_depth"]
                label = f"{group}, {cell.removesuffix('-T0')}"
                right.plot(range(1, len(shares) + 1), shares, style, color=color, label=label)
    right.set(
        title="held-out prompts, T = 0, loops excluded", xlabel="depth", ylabel="accepted, given the depth before"
    )
    right.set_ylim(0, 1)
    right.legend(fontsize=8, loc="lower left")
    figure.savefig(out, dpi=90)


def _mark_phases(axes: Any, steps: list[dict[str, Any]], phases: tuple[Phase, ...]) -> None:
    """A line where a phase begins, with what it changes."""
    for before, phase in zip(phases, phases[1:], strict=False):
        begins = next((r["step"] for r in steps if r["progress"] >= before.until), None)
        if begins is not None:
            axes.axvline(begins, color="grey", linestyle=":")
            label = f"{phase.seq_len:,} tokens" + (", INT4" if phase.int4 else "")
            place = {"ha": "right", "va": "top", "rotation": 90, "transform": axes.get_xaxis_transform()}
            axes.text(begins, 0.98, label, size=7, color="grey", **place)


def _read(path: pathlib.Path, stage: str, *, lines: bool = True) -> list[dict[str, Any]]:
    if not path.exists():
        raise KdjaxError(f"{path} is missing: run the stage {stage} first")
    text = path.read_text()
    return [json.loads(line) for line in (text.splitlines() if lines else [text])]


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in record.items()}
