"""The figures of an evaluation as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

COLUMNS = {"tau_micro": 2, "tau_macro": 2, "bytes_per_verify": 1}


def markdown(result: dict[str, Any]) -> str:
    """Tables of bits per byte, of acceptance by domain, and of acceptance by depth over the sums."""
    figures = msgspec.to_builtins(result)
    return "\n".join(
        [
            *_table(
                ["text", "KB", "model", "xz -9e", "zpaq -m5"],
                [
                    [name, f"{e['bytes'] / 1000:.0f}", *(_number(e[k], 3) for k in ("model", "xz", "zpaq"))]
                    for name, e in figures["bits_per_byte"].items()
                ],
            ),
            *(line for cell, entries in figures["acceptance"].items() for line in _acceptance(cell, entries)),
        ]
    )


def _acceptance(cell: str, entries: dict[str, Any]) -> list[str]:
    rows = []
    for name, e in entries.items():
        kept, everything = e["without_loops"], e["with_loops"]
        rows.append(
            [
                name,
                *(_number(kept and kept[k], digits) for k, digits in COLUMNS.items()),
                _number(everything["tau_micro"], 2),
                f"{e['looping']:.0%}",
                " ".join(f"{100 * a:.0f}" for a in kept["acceptance_by_depth"]) if kept else "-",
            ]
        )
    head = ["domain", "tau", "tau macro", "bytes/verify", "tau with loops", "loops", "accepted by depth, %"]
    return [f"### {cell}", "", *_table(head, rows)]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows)]
    return [*lines, ""]
