"""What the verbs `run` and `eval` share: sweeps read from TOML configs, measured into one folder each, and shown."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kdjax.cli import options
from kdjax.cli.interrupt import EXIT_INTERRUPTED, Interrupt
from kdjax.cli.start import configure_jax
from kdjax.config.sweep import Sweep, read_sweep
from kdjax.errors import KdjaxError

if TYPE_CHECKING:
    from kdjax.run.experiment import Evaluation, Experiment

EXIT_FAILED_CELLS, EXIT_ERROR = 1, 2


class Family(NamedTuple):
    """The studies of one verb: the TOML key that names one, its module by that name, and the words for people."""

    key: str
    find: Callable[[str], Experiment | Evaluation]
    example: str
    swept: str


def add_arguments(parser: argparse.ArgumentParser, family: Family) -> None:
    parser.set_defaults(overrides=[], typed={})
    parser.add_argument(
        "configs",
        nargs="+",
        type=Path,
        metavar="CONFIG",
        help=f"TOML file such as {family.example}, or a folder: all {family.key}s in it",
    )
    parser.add_argument(
        "--set",
        action=options.Override,
        dest="overrides",
        metavar="KEY=VALUE",
        help=f"override one key; a list makes an axis of the sweep, e.g. {family.swept}",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="the small sizes of the config's [smoke] table, in runs/NAME-smoke"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="run folder, default runs/NAME, or runs/NAME-smoke; with several configs their parent",
    )
    parser.add_argument("--no-plots", action="store_true", help="do not draw plot.png")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config as TOML and stop")


def run(args: argparse.Namespace, interrupt: Interrupt, family: Family) -> int:
    files = [file for given in args.configs for file in (_studies_in(given, family.key) if given.is_dir() else [given])]
    sweeps = [
        read_sweep(file, args.overrides, kind_of=lambda n: family.find(n).Config, key=family.key, smoke=args.smoke)
        for file in files
    ]
    if args.print_config:
        sys.stdout.write("\n".join(sweep.toml for sweep in sweeps))
        return 0
    if not args.no_plots:
        from kdjax.run import plot

        plot.require()
    folders = _folders(files, args.out, smoke=args.smoke)
    configure_jax(compilation_cache=True)
    status = 0
    for sweep, folder in zip(sweeps, folders, strict=True):
        try:
            status = max(status, _run_one(family, sweep, folder, interrupt, plot=not args.no_plots))
        except KdjaxError as error:
            if len(sweeps) == 1:
                raise
            print(f"kdjax: error: {error}", file=sys.stderr)  # one does not keep the others from running
            status = max(status, EXIT_ERROR)
        if interrupt.pressed:
            break
    return status


def _studies_in(folder: Path, key: str) -> list[Path]:
    def is_study(file: Path) -> bool:
        try:
            return key in tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
            return False

    found = [file for file in sorted(folder.glob("*.toml")) if is_study(file)]
    if not found:
        raise KdjaxError(f"{folder} has no TOML file with {key} = NAME: give another folder or a file")
    return found


def _folders(files: list[Path], out: Path | None, *, smoke: bool) -> list[Path]:
    names = [file.stem + ("-smoke" if smoke else "") for file in files]
    if len(set(names)) < len(names):
        raise KdjaxError(f"{names} are run folders of the same name: run the configs one by one with --out")
    if out is not None and len(files) == 1:
        return [out]
    return [(out or Path("runs")) / name for name in names]


def _run_one(family: Family, sweep: Sweep, folder: Path, interrupt: Interrupt, *, plot: bool) -> int:
    from kdjax.cli import findings
    from kdjax.run.runner import Run

    margin = Console(stderr=True, highlight=False)
    run = Run(family.find(sweep.name), sweep, folder)
    kept = len(sweep.cells) - len(run.pending)
    if kept:
        margin.print(f"{folder}: {kept} of {len(sweep.cells)} cells are there already", soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=margin, disable=not margin.is_terminal) as progress:
        cells = progress.add_task(sweep.name, total=len(run.pending))
        units = progress.add_task("units", visible=False)
        untold: list[str] = []
        for step in interrupt.iterate(run.steps()):
            progress.update(cells, description=f"{sweep.name}: {step.cell}", advance=int(step.ended))
            if step.of:
                progress.update(units, visible=True, completed=step.units, total=step.of)
            elif not step.ended:
                progress.reset(units, visible=False)
            if step.ended and step.cell in run.failures:
                untold.append(step.cell)
            if step.ended and not run.refusal:
                for cell in untold:
                    margin.print(f"cell {cell} failed: {run.failures[cell]}", style="red", soft_wrap=True)
                untold.clear()
    if interrupt.pressed:
        margin.print(f"interrupted; the same command continues in {folder}", soft_wrap=True)
        return EXIT_INTERRUPTED
    if run.refusal:
        raise KdjaxError(run.refusal)
    summary = run.summarise(plot=plot)
    findings.show(summary, findings.page(), folder)
    return EXIT_FAILED_CELLS if run.failures else 0
