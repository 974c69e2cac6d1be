"""What experiments found, as tables and sentences for people."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kdjax.run.compare import Comparison


def page() -> Console:
    """stdout, wide enough for a table where no terminal says how wide it is."""
    console = Console(file=sys.stdout)
    return console if console.is_terminal else Console(file=sys.stdout, width=180)


def show(summary: dict[str, Any], console: Console, folder: Path) -> None:
    """A row per cell, the definitions of its figures, and the findings. Intervals are of 95 %, by bootstrap."""
    metrics = [m for m in summary["metrics"] if any(m in cell for cell in summary["cells"].values())]
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=summary.get("experiment") or summary["evaluation"],
        title_justify="left",
    )
    table.add_column("cell")
    for metric in metrics or ["result"]:
        table.add_column(metric, justify="right")
    for cell, figures in summary["cells"].items():
        table.add_row(cell, *(_figure(figures.get(name)) for name in metrics))
    for cell in summary["failed"]:
        table.add_row(cell, "failed", style="red")
    console.print(table)
    for name in metrics:
        if definition := summary["metrics"][name].get("definition"):
            console.print(f"{name}: {definition}", style="dim", highlight=False)
    console.print(f"Brackets: 95 % confidence interval, {_method(summary['metrics'])}.", style="dim", highlight=False)
    if "experiment" in summary:  # the paper's words, which these figures need not bear out
        console.print(f"\nPublished: {summary['claim']}\nFound here:", highlight=False)
    else:
        console.print(f"\nMeasures: {summary['claim']}", highlight=False)
    for finding in summary["findings"]:
        console.print(f"- {finding}", highlight=False)
    console.print(f"\n{folder}", style="dim", highlight=False, soft_wrap=True)


def show_comparison(found: Comparison, console: Console) -> None:
    if found.settings:
        console.print("settings that differ, A -> B:")
    for key, values in found.settings.items():
        a, b = ("not set" if value is None else json.dumps(value, ensure_ascii=False) for value in values)
        console.print(f"  {key}: {a} -> {b}", markup=False, highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("cell")
    tested = any(d.p is not None for *_, d in found.rows)
    for name in ("metric", "A", "B", "B - A", "change", "units", *(["p"] if tested else [])):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for one, other, metric, d in found.rows:
        cell = one if one == other else f"{one} | {other}"
        interval = "" if d.low is None else f" [{d.low:+.3g}, {d.high:+.3g}]"
        interval += " *" if d.p is None and d.is_significant else ""
        change = "-" if d.change is None else f"{d.change:+.1%}"
        units = f"{d.n} paired" if d.paired else f"{d.n}"
        figures = (f"{d.a:.4g}", f"{d.b:.4g}", f"{d.difference:+.3g}{interval}", change, units)
        p = "" if d.p is None else f"{d.p:.3g}{' *' if d.is_significant else ''}"
        table.add_row(cell, metric, *figures, *([p] if tested else []), style="bold" if d.is_significant else "")
    console.print(table)
    console.print("Brackets: 95 % confidence interval, bootstrap over units; *: it leaves out zero.", style="dim")
    if tested:
        console.print("p: McNemar's exact test of units that only one side got right; *: below 0.05.", style="dim")
    for side, cells in (("A", found.only_a), ("B", found.only_b)):
        if cells:
            console.print(f"only in {side}: {'; '.join(cells)}", highlight=False)
    if found.changed:
        console.print(f"the runs differ in {', '.join(found.changed)}", style="yellow", highlight=False)


def _method(metrics: dict[str, Any]) -> str:
    """How the intervals of these metrics are made."""
    bootstrap = "bootstrap over the cell's units"
    shares = [name for name, metric in metrics.items() if metric.get("share")]
    if not shares:
        return bootstrap
    return f"Wilson's score of {', '.join(shares)}" + ("" if len(shares) == len(metrics) else f", else {bootstrap}")


def _figure(estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    interval = "" if estimate["low"] is None else f" [{estimate['low']:.3g}, {estimate['high']:.3g}]"
    return f"{estimate['value']:.4g}{interval}"
