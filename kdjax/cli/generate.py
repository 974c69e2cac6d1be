"""Continue prompts with a target model and its drafter. Text appears as it is decoded, then a table of figures."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.status import Status

from kdjax.bundled.locate import locate
from kdjax.cli import options, prompts
from kdjax.cli.interrupt import EXIT_INTERRUPTED, Interrupt
from kdjax.cli.live import Live
from kdjax.cli.progress import progress_in
from kdjax.cli.start import configure_jax, keep_stdout_for_python
from kdjax.config import Cluster, GenerateConfig, dumps, load
from kdjax.errors import KdjaxError
from kdjax.run import RunFolder, provenance

if TYPE_CHECKING:
    from kdjax.cli.report import Outcome
    from kdjax.cli.session import Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="text to continue; '-' reads stdin, as does no prompt at all; after --, it may begin with a dash",
    )
    parser.add_argument("--file", type=Path, action="append", default=[], help="a file to continue; may be repeated")
    options.add_config_arguments(parser)
    defaults = GenerateConfig()
    for flags, key, text, note in (
        (("--model",), "model.target", True, "checkpoint folder of the target, or bundled:NAME"),
        (
            ("--drafter",),
            "model.drafter",
            True,
            "checkpoint folder of its drafter, or bundled:NAME; a bundled target has its own",
        ),
        (("--mode",), "decode.mode", True, "tree, chain or autoregressive"),
        (("--budget",), "decode.budget", False, "tree nodes, root not counted"),
        (("-n", "--max-new-tokens"), "decode.max_new_tokens", False, "tokens per prompt at most"),
        (("--temperature",), "decode.temperature", False, "0 is greedy"),
        (("--seed",), "decode.seed", False, "seed of the sampling noise"),
    ):
        section, name = key.split(".")
        default = getattr(getattr(defaults, section), name)
        shown = "" if default is None else f", default {default}"
        parser.add_argument(
            *flags,
            action=options.shorthand(key, text=text),
            dest="overrides",
            metavar="VALUE",
            help=f"{note} ({key}{shown})",
        )
    parser.add_argument(
        "--mesh", type=Path, metavar="FILE", help="split the model over devices: configs/meshes/NAME.toml"
    )
    parser.add_argument(
        "--allow-mismatch",
        action="append_const",
        dest="overrides",
        const="model.allow_mismatch=true",
        help="use a drafter that was trained for another target (model.allow_mismatch)",
    )
    parser.add_argument(
        "--processes",
        metavar="WHICH",
        help="one of several processes: auto (Slurm, Kubernetes, Open MPI) or HOST:PORT,COUNT,INDEX",
    )
    parser.add_argument("--compare", action="store_true", help="also decode by chain and autoregressively")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text and table")
    parser.add_argument("--out", type=Path, metavar="DIR", help="save config, provenance and metrics there")


def run(args: argparse.Namespace, interrupt: Interrupt) -> int:
    try:
        config = load(GenerateConfig, args.config, [*_mesh(args.mesh), *args.overrides])
    except KdjaxError as error:
        raise KdjaxError(options.as_typed(str(error), args.typed)) from error
    if args.print_config:
        sys.stdout.write(dumps(_settled(config)))
        return 0
    texts = prompts.read(args.prompts, args.file)
    modes = _modes(config.decode.mode, compare=args.compare)
    target, drafter = locate(config.model, needs_drafter=modes != ["autoregressive"])
    if args.out:
        RunFolder.reserve(args.out)
    if args.processes:
        keep_stdout_for_python()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")

    # Before the status line, which puts itself in the place of sys.stdout while it is shown.
    page = Console(file=io.StringIO() if args.json else sys.stdout)
    margin = Console(stderr=True, highlight=False)
    with margin.status("starting") as status, contextlib.ExitStack() as processes:
        configure_jax(compilation_cache=config.runtime.compilation_cache)
        from kdjax.cli.session import Session
        from kdjax.decode.limits import check_decoding
        from kdjax.sharding import joined

        speaks = processes.enter_context(joined(args.processes, f"{dumps(config)}{texts}{modes}"))
        if not speaks:
            status.stop()
            margin.quiet, page = True, Console(file=io.StringIO())
        config = _settled(config)
        for mode in modes:
            check_decoding(msgspec.structs.replace(config.decode, mode=mode), target, drafter)
        session = Session(config, target, drafter, texts, progress_in(status))
        if (note := session.chain_note) and _asks_for_budget(args, config):
            margin.print(note, soft_wrap=True)
        folder = RunFolder.create(args.out, config) if args.out and speaks else None
        if folder:
            checkpoints = {"target": target} | ({"drafter": drafter} if drafter else {})
            folder.write("provenance.json", provenance(checkpoints, session.backend))
        status.update("compiling; later starts find the programs in the cache")
        live = Live(texts, page, before=status.stop)
        outcomes = _decode(session, modes, live, status, interrupt)
    if not speaks:
        return EXIT_INTERRUPTED if interrupt.pressed else 0
    interrupted = interrupt.pressed
    return _report(session, live.texts, outcomes, folder, margin, interrupted=interrupted, as_json=args.json)


def _asks_for_budget(args: argparse.Namespace, config: GenerateConfig) -> bool:
    named = any(text.partition("=")[0].strip() == "decode.budget" for text in args.overrides)
    return named or config.decode.budget != GenerateConfig().decode.budget


def _mesh(file: Path | None) -> list[str]:
    """The [mesh] of a mesh file as overrides, which explicit ones follow and win over."""
    if file is None:
        return []
    mesh = load(Cluster, file).mesh
    return [f"mesh.{name}={json.dumps(getattr(mesh, name))}" for name in mesh.__struct_fields__]


def _settled(config: GenerateConfig) -> GenerateConfig:
    """With all that the config leaves to the device. Imports JAX."""
    from kdjax.model.runtime import settled

    return msgspec.structs.replace(config, runtime=settled(config.runtime, config.mesh))


def _modes(chosen: str, *, compare: bool) -> list[str]:
    others = [mode for mode in ("tree", "chain", "autoregressive") if mode != chosen]
    return [chosen, *others] if compare else [chosen]


def _decode(session: Session, modes: list[str], live: Live, status: Status, interrupt: Interrupt) -> dict[str, Outcome]:
    """The first mode is shown as it goes; the others run for the comparison, which a Ctrl-C gives up."""
    shown, *others = modes
    outcomes = {shown: session.decode(shown, live, interrupt)}
    if interrupt.pressed:
        live.interrupt()
        return outcomes
    for mode in others:
        status.update(f"comparing with mode {mode}")
        status.start()
        outcome = session.decode(mode, None, interrupt)
        if interrupt.pressed:
            return {shown: outcomes[shown]}
        outcomes[mode] = outcome
    return outcomes


def _report(
    session: Session,
    texts: list[str],
    outcomes: dict[str, Outcome],
    folder: RunFolder | None,
    margin: Console,
    *,
    interrupted: bool,
    as_json: bool,
) -> int:
    from kdjax.cli import report

    summary = {**report.as_json(texts, outcomes, session.backend), "interrupted": interrupted}
    try:
        if folder:
            for mode, outcome in outcomes.items():
                for index, stream in enumerate(report.streams(outcome)):
                    folder.log({"mode": mode, "prompt": index, **stream})
            folder.write("summary.json", summary)
    finally:  # shown even where it cannot be saved
        if as_json:
            print(json.dumps(summary, ensure_ascii=False))
        else:
            if margin.is_terminal:
                margin.print(report.ending(next(iter(outcomes.values()))), style="dim")
            report.show(outcomes, session.backend, margin, interrupted=interrupted)
    return EXIT_INTERRUPTED if interrupted else 0
