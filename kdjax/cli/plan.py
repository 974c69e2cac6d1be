"""Tell, without a GPU, whether a model fits on a mesh and what a step of speculative decoding costs there."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from kdjax.cli import options
from kdjax.cli.interrupt import Interrupt
from kdjax.cli.start import configure_jax
from kdjax.config import Cluster, ModelPair, load
from kdjax.errors import KdjaxError

if TYPE_CHECKING:
    from kdjax.plan import Compiled, Plan

DEFINITION = (
    "Floor: every needed byte read once, at the device's measured rate; experts chosen uniformly and independently. "
    "Acceptance: tokens per round and stream, bonus included."
)


CONTEXT = 32768


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="configs/models/NAME.toml or a checkpoint folder")
    parser.add_argument("--mesh", type=Path, required=True, metavar="FILE", help="configs/meshes/NAME.toml")
    parser.add_argument("--drafter", type=Path, metavar="FOLDER", help="drafter of a checkpoint folder")
    count = options.at_least(1)
    parser.add_argument(
        "--context", type=count, metavar="N", help=f"tokens per stream, default {CONTEXT}, or the model's limit if less"
    )
    parser.add_argument("--streams", type=count, default=1, metavar="N", help="streams at once, default %(default)s")
    parser.add_argument(
        "--budget", type=options.at_least(0), default=7, metavar="N", help="tree nodes, %(default)s; 0: no drafts"
    )
    parser.add_argument(
        "--acceptance", type=_numbers, metavar="A,B", help="tokens per round to state tok/s for, default 2,3,4,5"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the decode step for these GPUs, which needs kdjax[cuda13]"
    )
    parser.add_argument(
        "--backend", choices=("triton", "xla"), default="triton", help="kernels to compile, %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, interrupt: Interrupt) -> int:
    cluster = load(Cluster, args.mesh)
    pair = None if args.model.is_dir() else load(ModelPair, args.model)
    # Nothing runs on a device here, and the CUDA plugin is not to look for a driver.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    configure_jax(compilation_cache=False)
    import jax

    jax.config.update("jax_platforms", "cpu")
    from kdjax import plan
    from kdjax.checkpoint import read_drafter_config, read_model_config

    if pair is None:
        drafter = read_drafter_config(args.drafter) if args.drafter else None
        pair = ModelPair(target=read_model_config(args.model), drafter=drafter)
    depth = pair.drafter.block_size - 1 if pair.drafter else args.budget
    most = 1 + min(args.budget, depth)
    if impossible := [rate for rate in args.acceptance or () if rate > most]:
        raise KdjaxError(
            f"--acceptance {impossible[0]:g}: a round commits at most {most} with --budget {args.budget} and {depth} "
            "drafted tokens, the bonus included: give less"
        )
    acceptance = args.acceptance or tuple(rate for rate in (2.0, 3.0, 4.0, 5.0) if rate <= most) or (1.0,)
    context = args.context or min(CONTEXT, pair.target.max_position_embeddings)
    workload = plan.Workload(context, args.streams, args.budget)
    found = plan.plan(pair, cluster, workload)
    if args.compile:
        with Console(stderr=True).status("compiling the decode step"):
            compiled = plan.compile_step(pair, cluster, workload, args.backend)
        found = dataclasses.replace(found, compiled=compiled)
    if args.json:
        print(json.dumps(found.as_json(acceptance)))
    else:
        _show(found, acceptance, Console(highlight=False))
    return 0


def _numbers(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (0.0,)
    if not all(1 <= value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1 such as 3,4.5, not {text!r}")
    return values


def _show(plan: Plan, acceptance: tuple[float, ...], console: Console) -> None:
    held, step = plan.memory, plan.step
    n = plan.workload
    streams = f"{n.streams} stream{'s' * (n.streams > 1)}"
    console.print(
        f"{plan.mesh.devices} x {plan.device.kind}, {streams} of {n.context} tokens, "
        f"{n.tokens} tokens per step (budget {n.budget})"
    )
    memory = {f"target {name}": size for name, size in held.target.items()}
    memory |= {"drafter": sum(held.drafter.values())} if held.drafter else {}
    memory |= {"KV cache": held.kv_cache} | ({"drafter cache": held.drafter_cache} if held.drafter else {})
    memory |= {"workspace (estimate)": held.workspace, "total": held.total, "headroom": plan.headroom}
    console.print(_table("memory of a device", memory))
    console.print(_table("read in a step, busiest device", step.reads | {"total": step.bytes}))
    busiest = f", on the busiest device {step.experts_read:.1f}" if plan.mesh.expert > 1 else ""
    console.print(f"distinct experts per layer: {step.distinct_experts:.1f}{busiest}")
    exchanges = step.all_reduce_ms(plan.device)
    known = "not measured" if exchanges is None else f"{exchanges:.2f} ms"
    console.print(f"floor {plan.floor_ms:.2f} ms per step; all-reduces {known}")
    if n.budget:
        console.print(
            f"autoregressive floor {plan.plain.floor_ms(plan.device):.2f} ms: speculation pays from "
            f"{plan.break_even:.2f} tokens per round"
        )
    rates = Table("acceptance", "tok/s at the floor", "tok/s with all-reduces", box=box.SIMPLE_HEAD, pad_edge=False)
    for rate in map(plan.rate, acceptance):
        total = "-" if rate.with_all_reduce is None else f"{rate.with_all_reduce:.0f}"
        rates.add_row(f"{rate.acceptance:g}", f"{rate.floor:.0f}", total)
    console.print(rates)
    console.print(DEFINITION, style="dim")
    if compiled := plan.compiled:
        _show_compiled(compiled, console)
    room = f"{plan.device.memory_gb:g} GB"
    if plan.fits:
        console.print(f"fits: {plan.headroom / 1e9:.1f} GB of {room} are left", style="green")
    else:
        console.print(f"DOES NOT FIT: {-plan.headroom / 1e9:.1f} GB too much for {room}", style="red")


def _show_compiled(compiled: Compiled, console: Console) -> None:
    size = {"target weights": compiled.target_weights, "drafter weights": compiled.drafter_weights}
    size |= {"caches and counters": compiled.state, "workspace": compiled.workspace, "total": compiled.total}
    console.print(_table(f"memory of a device, compiled with backend {compiled.backend}", size))
    collectives = ", ".join(f"{count} {kind}" for kind, count in compiled.collectives.items()) or "no collectives"
    seconds = ", ".join(f"{what} {value:.1f} s" for what, value in compiled.seconds.items())
    console.print(f"{collectives} per round; {seconds}")


def _table(title: str, rows: dict[str, int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, no_wrap=True)
    table.add_column("GB", justify="right")
    for name, size in rows.items():
        table.add_row(name.replace("_", " "), f"{size / 1e9:.3f}")
    return table
