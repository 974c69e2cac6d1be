"""The figures of an evaluation as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from experiments.nano.config import Cell


def markdown(result: dict[str, Any], cells: Sequence[Cell], sums: Sequence[str]) -> str:
    """Bits per byte; tau by domain; and for the `sums` over domains everything else that was measured."""
    figures = msgspec.to_builtins(result)
    acceptance = figures["acceptance"]
    return "\n\n".join(
        [
            _bits(figures["bits_per_byte"]),
            _tau(acceptance, cells),
            *(_details(acceptance, cells, name) for name in sums),
        ]
    )


def _bits(entries: dict[str, Any]) -> str:
    return _table(
        ["text", "KB", "model", "zpaq -m5", "xz -9e"],
        [
            [name, f"{e['bytes'] / 1000:.0f}", *(_number(e[k], 3) for k in ("model", "zpaq", "xz"))]
            for name, e in entries.items()
        ],
    )


def _tau(acceptance: dict[str, Any], cells: Sequence[Cell]) -> str:
    """One row a domain: tau without loops and, in brackets, with them; the share of looping outputs by temperature."""
    by_temperature = {cell.temperature: cell for cell in cells}
    rows = []
    for domain in acceptance[cells[0].name]:
        entries = [acceptance[cell.name][domain] for cell in cells]
        loops = [acceptance[cell.name][domain]["looping"] for cell in by_temperature.values()]
        rows.append([domain, *map(_with_and_without, entries), *(f"{share:.0%}" for share in loops)])
    return _table(["text", *map(_title, cells), *(f"loops, T {t:g}" for t in by_temperature)], rows)


def _details(acceptance: dict[str, Any], cells: Sequence[Cell], name: str) -> str:
    rows = []
    for cell in cells:
        entry = acceptance[cell.name].get(name, {})
        for kind, title in (("without_loops", "no loops"), ("without_repetition", "no repetition")):
            if summary := entry.get(kind):
                figures = [_number(summary[k], 2) for k in ("tau_micro", "tau_macro")]
                counts = [str(summary[k]) for k in ("prompts", "rounds")]
                depths = " ".join(f"{100 * share:.0f}" for share in summary["acceptance_by_depth"])
                size = _number(summary["bytes_per_verify"], 1)
                rows.append([f"{_title(cell)}, {title}", *figures, size, *counts, depths])
    head = ["tau micro", "tau macro", "bytes/verify", "outputs", "rounds", "accepted at depth 1 2 ..., %"]
    return _table([name, *head], rows)


def _title(cell: Cell) -> str:
    return f"{cell.mode} {cell.budget}, T {cell.temperature:g}"


def _with_and_without(entry: dict[str, Any]) -> str:
    kept = entry["without_loops"]
    return f"{_number(kept and kept['tau_micro'], 2)} ({_number(entry['with_loops']['tau_micro'], 2)})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---", *["---:"] * (len(head) - 1)], *rows))
