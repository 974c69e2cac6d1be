"""Quantise the routed experts of a bf16 checkpoint to the INT4 form in which Kimi K2.6 is published."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kdjax.cli.interrupt import Interrupt
from kdjax.cli.options import at_least
from kdjax.cli.progress import byte_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="FOLDER", help="bf16 checkpoint in the Hugging Face layout")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder for the INT4 checkpoint")
    parser.add_argument(
        "--group-size", type=at_least(1), default=32, metavar="N", help="input columns per scale, default %(default)s"
    )
    parser.add_argument(
        "--scale",
        choices=("max/7", "max/7.5"),
        default="max/7.5",
        help="scale of a group: its largest weight over 7.5 (as compressed-tensors, default) or 7 (no code -8)",
    )
    parser.add_argument("--workers", type=at_least(1), default=os.cpu_count(), metavar="N", help="threads")


def run(args: argparse.Namespace, interrupt: Interrupt) -> int:
    from kdjax.checkpoint.quantize import quantize_folder

    with byte_progress("quantising") as progress:
        done = quantize_folder(
            args.source,
            args.out,
            group_size=args.group_size,
            rule=args.scale,
            workers=args.workers,
            progress=progress,
        )
    print(
        f"{args.out}: {done.matrices} expert matrices in INT4, {done.copied} tensors copied; "
        f"{done.bytes_before / 1e9:.3f} GB -> {done.bytes_after / 1e9:.3f} GB"
    )
    return 0
