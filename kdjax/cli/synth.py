"""Write checkpoints of random weights in the layout of Kimi K2.6, at any scale. Their text is noise."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from kdjax.cli import options
from kdjax.cli.interrupt import Interrupt
from kdjax.cli.progress import byte_progress
from kdjax.config import ModelPair, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(overrides=[], typed={})
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file such as configs/models/kimi-k2.6.toml")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="gets the folders target and drafter")
    parser.add_argument("--layers", type=options.at_least(1), metavar="N", help="target layers, default as configured")
    parser.add_argument("--dense", action="store_true", help="bf16 experts instead of INT4")
    parser.add_argument("--only", choices=("target", "drafter"), help="write one of the two")
    parser.add_argument("--seed", type=options.at_least(0), default=0, metavar="N", help="default %(default)s")
    parser.add_argument("--workers", type=options.at_least(1), default=os.cpu_count(), metavar="N", help="threads")
    parser.add_argument(
        "--set",
        action=options.Override,
        dest="overrides",
        metavar="KEY=VALUE",
        help="override one key, e.g. target.n_routed_experts=64",
    )


def run(args: argparse.Namespace, interrupt: Interrupt) -> int:
    pair = load(ModelPair, args.config, args.overrides)
    from kdjax.checkpoint import synth

    target, drafter = pair.target, pair.drafter
    if args.layers:
        target, drafter = synth.shorten(target, drafter, args.layers)
    if args.dense:
        target = msgspec.structs.replace(target, experts_int4=None)
    settings = {"seed": args.seed, "workers": args.workers}
    if args.only != "drafter":
        folder = args.out / "target"
        with byte_progress("target") as progress:
            written = synth.write_target(folder, target, progress=progress, **settings)
        print(f"{folder}: {target.num_hidden_layers} layers, {written / 1e9:.3f} GB")
    if drafter and args.only != "target":
        folder = args.out / "drafter"
        with byte_progress("drafter") as progress:
            written = synth.write_drafter(folder, drafter, progress=progress, **settings)
        print(f"{folder}: {drafter.num_hidden_layers} layers, {written / 1e9:.3f} GB")
    return 0
