"""Compare two finished runs of one experiment, cell by cell, with confidence intervals of the differences."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kdjax.cli.interrupt import Interrupt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="run folder")
    parser.add_argument("b", type=Path, metavar="B", help="run folder; may be A again, with --cells")
    parser.add_argument(
        "--cells", nargs=2, metavar=("CELL_A", "CELL_B"), help="one cell of each, by default those of the same name"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace, interrupt: Interrupt) -> int:
    from kdjax.cli import findings
    from kdjax.run.compare import compare, read_finished

    found = compare(read_finished(args.a), read_finished(args.b), tuple(args.cells) if args.cells else None)
    if args.json:
        rows = [
            {"cell_a": one, "cell_b": other, "metric": metric, **d._asdict(), "significant": d.is_significant}
            for one, other, metric, d in found.rows
        ]
        settings = {key: {"a": a, "b": b} for key, (a, b) in found.settings.items()}
        changed = {"settings": settings, "only_a": found.only_a, "only_b": found.only_b, "provenance": found.changed}
        print(json.dumps({"differences": rows, **changed}, ensure_ascii=False))
    else:
        findings.show_comparison(found, findings.page())
    return 0
