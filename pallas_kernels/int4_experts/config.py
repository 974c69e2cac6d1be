"""How the kernels cut their work: the tuned choices per kind of device, expert width and number of tokens."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Literal

TABLES = Path(__file__).parent / "tuned"
KINDS = {"NVIDIA H200": "h200", "NVIDIA RTX PRO 6000 Blackwell": "rtx_pro_6000"}

Grouping = Literal["row", "scan", "align"]
Form = Literal["token", "group"]
ScaleOn = Literal["sum", "weight"]


@dataclasses.dataclass(frozen=True)
class Tile:
    """The work of one program of one kernel.

    Attributes:
        rows: weight rows of one accumulator, 16, 32 or 64.
        count: accumulators side by side (for gate+up: pairs of them), which share their activations.
        tokens: columns of an accumulator, 8 or a larger power of two.
        warps, stages: of Triton.
        splits: programs that share the columns of the weights; their float32 partial sums are added afterwards.
        steps: tiles that one program takes one after the other (down of narrow experts).
        scale_on: "sum" scales the accumulator of each group, "weight" every weight before it is multiplied.
    """

    rows: int
    tokens: int = 8
    warps: int = 4
    stages: int = 3
    count: int = 1
    splits: int = 1
    steps: int = 1
    scale_on: ScaleOn = "sum"


@dataclasses.dataclass(frozen=True)
class Config:
    """
    Attributes:
        grouping: which assignments of tokens to experts share a program of `gate_up.tokens` columns. "row": none,
            "scan": each program finds those of its expert, "align": a kernel sorts them by expert first.
        down_form: "token": a program sums over the experts of one token and writes its output; narrow experts only.
            "group": the same groups as gate+up, and the weighted sum over the experts in XLA.
    """

    grouping: Grouping
    down_form: Form
    gate_up: Tile
    down: Tile


@dataclasses.dataclass(frozen=True)
class Ring:
    """How the programs of one product of the Mosaic kernel cut their work and what they hold in shared memory.

    Attributes:
        warpgroups: of a program, which share their activations and have weight rows of their own.
        count: row blocks of a warpgroup (for gate+up: pairs of them).
        blocks: column blocks of a stage.
        stages: of weights, and of activations unless they are `resident`.
        steps: sets of row blocks that a program takes one after the other.
        resident: the activations of all columns stay in shared memory.
    """

    warpgroups: int = 1
    count: int = 1
    blocks: int = 1
    stages: int = 4
    steps: int = 1
    resident: bool = False


@dataclasses.dataclass(frozen=True)
class Rings:
    """Choices of the Mosaic kernel. Attributes:
    tokens: of one expert that share a program, a multiple of 8.
    """

    tokens: int
    gate_up: Ring
    down: Ring


def from_json(entry: dict[str, Any]) -> Config | Rings:
    if kernel_of(entry) == "mosaic":
        return Rings(entry["group"], Ring(**entry["gate_up"]), Ring(**entry["down"]))
    fields = {k: v for k, v in entry.items() if k in ("grouping", "down_form")}
    return Config(gate_up=Tile(**entry["gate_up"]), down=Tile(**entry["down"]), **fields)


def to_json(config: Config | Rings) -> dict[str, Any]:
    if isinstance(config, Config):
        return dataclasses.asdict(config)
    gate_up, down = dataclasses.asdict(config.gate_up), dataclasses.asdict(config.down)
    return {"kernel": "mosaic", "group": config.tokens, "gate_up": gate_up, "down": down}


def kernel_of(entry: dict[str, Any]) -> str:
    return entry.get("kernel", "triton")


def table_name(device_kind: str) -> str:
    """Of the device whose name `device_kind` starts with, or "default"."""
    return next((file for prefix, file in KINDS.items() if device_kind.startswith(prefix)), "default")


@functools.cache
def device_table(device_kind: str) -> dict[str, Any]:
    return json.loads((TABLES / f"{table_name(device_kind)}.json").read_text(encoding="utf-8"))


def choose(table: dict[str, Any], tokens: int, inner: int, kernels: tuple[str, ...] = ("triton",)) -> Config | Rings:
    """The configuration of the narrowest tuned expert width >= `inner` and the smallest tuned count >= `tokens`.

    Args:
        kernels: those that may be chosen, the first of them where both are tuned for a case.

    Raises:
        NotImplementedError: none of `kernels` is tuned for this device.
    """
    allowed = {int(k): [e for e in entries if kernel_of(e) in kernels] for k, entries in table["experts"].items()}
    widths = {
        width: sorted(entries, key=lambda e: (e["tokens"], kernels.index(kernel_of(e))))
        for width, entries in allowed.items()
        if entries
    }
    if not widths:
        raise NotImplementedError(f"int4_experts: {' and '.join(kernels)} cannot run on this device: use 'triton'")
    entries = widths[min((w for w in widths if w >= inner), default=max(widths))]
    enough = min(tokens, entries[-1]["tokens"])
    return from_json(next(e for e in entries if e["tokens"] >= enough))


def choose_matmul(table: dict[str, Any], tokens: int) -> Tile:
    entries = table["matmul"]
    return Tile(**next((e for e in entries if e["tokens"] >= tokens), entries[-1])["tile"])
