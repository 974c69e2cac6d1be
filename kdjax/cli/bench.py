"""Measure kernels, whole decode steps and the reading of prompts on the devices at hand.

`step` times a round of speculative decoding and its stages, `ttft` the time to a prompt's first token, both with random
weights made on the device; the other benches take the options of their modules, which `kdjax bench NAME --help` lists.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kdjax.cli import options
from kdjax.cli.interrupt import Interrupt
from kdjax.cli.start import configure_jax
from kdjax.config import Cluster, ModelPair, load
from kdjax.errors import KdjaxError

if TYPE_CHECKING:
    from kdjax.bench.subject import Subject
    from kdjax.model.runtime import Dtype

KERNELS = {
    "moe": ("pallas_kernels.int4_experts.bench", "a layer of routed INT4 experts"),
    "attention": ("pallas_kernels.tree_attention.bench", "attention of a draft tree over a cached context"),
    "prefill": ("pallas_kernels.prefill_attention.bench", "attention of a prompt's chunk"),
    "tree": ("kdjax.tree.bench", "building draft trees"),
}
ANYWHERE = {"moe": ("interpret",), "tree": ("xla", "interpret")}
"""Backends of a bench that need no GPU."""
PARTS = ("round", "verify", "stages", "components", "exchanges", "trace")
CPU_CEILING_BYTES = 2**28
"""More than its caches hold. XLA's CPU backend needs ten times that much memory to make and to reduce them."""
TREE_ROWS = 64
"""Rows of a verify forward up to which one number of tokens means one stream."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="step|equal|ttft|gaps|" + "|".join(KERNELS), required=True)
    step = actions.add_parser(
        "step", help="a round of decoding, its stages, and how near its floor it is", allow_abbrev=False
    )
    _add_subject(step)
    _add_workloads(step, [(1, 1), (1, 8), (1, 32), (10, 8)])
    step.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1], help="default: all but trace")
    step.add_argument(
        "--component-layers",
        type=options.at_least(1),
        default=8,
        metavar="N",
        help="layers from which the parts of a verify forward are scaled up, default %(default)s",
    )
    step.add_argument("--trace", type=Path, metavar="DIR", help="profile some rounds; for the part trace")
    step.add_argument("--threads", type=options.at_least(1), default=16, metavar="N", help="programs compiled at once")
    step.set_defaults(action=_step)

    equal = actions.add_parser("equal", help="whether a mesh computes what one of its devices does", allow_abbrev=False)
    _add_subject(equal)
    _add_workloads(equal, [(1, 8)])
    equal.add_argument(
        "--rounds", type=options.at_least(1), default=8, metavar="N", help="rounds to compare, default %(default)s"
    )
    equal.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default %(default)s")
    equal.set_defaults(action=_equal)

    ttft = actions.add_parser("ttft", help="time to the first token of a prompt", allow_abbrev=False)
    _add_subject(ttft)
    ttft.add_argument(
        "--prompts",
        type=options.at_least(1),
        nargs="+",
        default=[8192, 32768, 200_000],
        metavar="N",
        help="their lengths in tokens, default 8192 32768 200000",
    )
    ttft.add_argument(
        "--chunk", type=options.at_least(1), default=4096, metavar="N", help="tokens per forward, default %(default)s"
    )
    ttft.set_defaults(action=_ttft)

    gaps = actions.add_parser("gaps", help="where a profiled GPU waited: its largest gaps", allow_abbrev=False)
    gaps.add_argument("trace", type=Path, metavar="DIR", help="folder of a profile")
    gaps.add_argument("--largest", type=options.at_least(1), default=10, metavar="N", help="default %(default)s")
    gaps.set_defaults(action=_gaps)

    for name, (module, summary) in KERNELS.items():
        # No option is this parser's own: all of them go to the module.
        kernel = actions.add_parser(name, help=summary, add_help=False, prefix_chars="\0")
        kernel.add_argument("arguments", nargs=argparse.REMAINDER)
        kernel.set_defaults(action=_kernel, bench=name, module=module)


def _add_subject(parser: argparse.ArgumentParser) -> None:
    """What is measured, for how long, and where the result goes."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="configs/models/NAME.toml")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--rank-of", type=Path, metavar="FILE", help="mesh file: one device's share of it, its exchanges left out"
    )
    where.add_argument("--mesh", type=Path, metavar="FILE", help="mesh file: on all its devices; default one device")
    parser.add_argument("--layers", type=options.at_least(1), metavar="N", help="target layers, default as configured")
    parser.add_argument("--backend", choices=("triton", "xla", "interpret"), help="kernels; default triton on a GPU")
    parser.add_argument(
        "--seconds", type=options.at_least(1), default=3600, metavar="N", help="start no measurement after this long"
    )
    parser.add_argument("--smoke", action="store_true", help="a hundredth of the model, to try the measurement itself")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON, written after every measurement")


def _add_workloads(parser: argparse.ArgumentParser, default: list[tuple[int, int]]) -> None:
    parser.add_argument("--context", type=options.at_least(1), default=4096, metavar="N", help="default %(default)s")
    said = " ".join(str(rows) if streams == 1 else f"{streams}x{rows}" for streams, rows in default)
    parser.add_argument(
        "--tokens",
        type=_workload,
        nargs="+",
        default=default,
        metavar="N",
        help="tokens of a verify forward, STREAMSxTOKENS for several streams; above 64, N means streams of 8; "
        f"default {said}",
    )


def run(args: argparse.Namespace, interrupt: Interrupt) -> int:
    return args.action(args)


def _kernel(args: argparse.Namespace) -> int:
    configure_jax(compilation_cache=False)
    import jax

    if jax.default_backend() != "gpu":
        _check_runs_without_gpu(args.bench, args.arguments, jax.default_backend())
    try:
        importlib.import_module(args.module).main(args.arguments, prog=f"kdjax bench {args.bench}")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def _check_runs_without_gpu(bench: str, arguments: list[str], platform: str) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--backend")
    asked, backends = parser.parse_known_args(arguments)[0], ANYWHERE.get(bench, ())
    if not asked.help and asked.backend not in backends:
        remedy = f", or give --backend {' or '.join(backends)}" if backends else ""
        raise KdjaxError(f"kdjax bench {bench} measures a GPU and JAX sees only {platform}: run it there{remedy}")


def _gaps(args: argparse.Namespace) -> int:
    from kdjax.bench import trace

    for device in trace.idle(args.trace, args.largest):
        print(*trace.lines(device), sep="\n")
    return 0


def _subject(args: argparse.Namespace, dtype: Dtype = "bfloat16") -> tuple[Subject, Cluster | None, dict[str, Any]]:
    """What is measured, its mesh file, and what a result says of both."""
    file = args.rank_of or args.mesh
    pair, cluster = load(ModelPair, args.model), load(Cluster, file) if file else None
    configure_jax(compilation_cache=True)
    import jax

    from kdjax.bench.subject import Subject, hundredth
    from kdjax.checkpoint.synth import shorten
    from kdjax.config import ONE_DEVICE
    from pallas_kernels import timing

    if args.smoke:
        pair = hundredth(pair)
    if args.layers:
        target, drafter = shorten(pair.target, pair.drafter, args.layers)
        pair = ModelPair(target=target, drafter=drafter)
    mesh = cluster.mesh if cluster else ONE_DEVICE
    backend = args.backend or ("triton" if jax.default_backend() == "gpu" else "xla")
    subject = Subject.of(pair, mesh, backend, jax.devices(), rank=args.rank_of is not None, dtype=dtype)
    return (
        subject,
        cluster,
        {
            **timing.device_facts(),
            "subject": f"one rank's share of {mesh.devices} devices, alone" if subject.rank_of else "the whole model",
            "weights": "random, made on the device",
            "model": args.model.stem + (" (smoke)" if args.smoke else ""),
            "layers": pair.target.num_hidden_layers,
            "mesh": msgspec.to_builtins(mesh),
            "backend": backend,
        },
    )


def _step(args: argparse.Namespace) -> int:
    deadline = time.monotonic() + args.seconds
    if "trace" in args.parts and args.trace is None:
        raise KdjaxError("--parts trace needs a folder: give --trace DIR")
    subject, cluster, header = _subject(args)
    import jax

    from kdjax.bench import room, step
    from kdjax.plan import Workload
    from pallas_kernels import timing

    device = cluster.device if cluster else None
    workloads = [Workload(args.context, streams, rows - 1) for streams, rows in args.tokens]
    room.require([subject], workloads)
    old = step.kept_rows(args.out, header)
    settings = step.Settings(
        tuple(args.parts), args.component_layers, args.threads, args.trace if "trace" in args.parts else None
    )
    if args.smoke:
        settings = settings._replace(ms=1.0, repetitions=1, ceiling_bytes=2**22)
    elif jax.default_backend() == "cpu":
        settings = settings._replace(ceiling_bytes=CPU_CEILING_BYTES)
    for rows, case, stage, ms in step.measure(subject, workloads, device, settings, deadline):
        timing.write_rows(args.out, step.merged(old, rows), **header)
        print(f"{case} tokens: {stage} {ms:.4f} ms", file=sys.stderr, flush=True)
        for device_idle in rows[-1].get("idle", ()):
            print(f"{device_idle['device']}: idle {device_idle['idle_fraction']:.1%}", file=sys.stderr, flush=True)
    return 0


def _equal(args: argparse.Namespace) -> int:
    deadline = time.monotonic() + args.seconds
    if args.mesh is None:
        raise KdjaxError("kdjax bench equal compares a mesh with one of its devices: give --mesh FILE")
    subject, _, header = _subject(args, args.dtype)
    if subject.mesh is None:
        raise KdjaxError(f"{args.mesh} is a mesh of one device: there is nothing to compare")

    from kdjax.bench import equality, room
    from kdjax.plan import Workload
    from pallas_kernels import timing

    workloads = [Workload(args.context, streams, each - 1) for streams, each in args.tokens]
    for workload in workloads:  # one after the other
        room.require([subject, equality.alone(subject)], [workload])
    rows = []
    for workload in workloads:
        if time.monotonic() > deadline:
            break
        found = equality.compare(subject, workload, args.rounds)
        streams, each = workload.streams, workload.budget + 1
        rows.append({"tokens": streams * each, "streams": streams, "context": args.context, **found})
        timing.write_rows(args.out, rows, **header, dtype=args.dtype)
        print(
            f"{streams}x{each} tokens: logits differ by {found['logits_relative_difference']:.2g}, first choices alike "
            f"in {found['top1_same']} of {found['rows']} rows",
            file=sys.stderr,
            flush=True,
        )
    return 0


def _ttft(args: argparse.Namespace) -> int:
    deadline = time.monotonic() + args.seconds
    subject, _, header = _subject(args)
    longest = subject.pair.target.max_position_embeddings
    if (asked := max(args.prompts)) > longest:
        raise KdjaxError(f"--prompts {asked} exceeds the model's max_position_embeddings={longest}: give shorter ones")

    from kdjax.bench import prompt, room
    from kdjax.plan import Workload
    from pallas_kernels import timing

    budget = 0 if subject.pair.drafter is None else subject.pair.drafter.block_size - 1
    room.require([subject], [Workload(max(args.prompts), 1, budget)])
    rows = []
    for row in prompt.measure(subject, args.prompts, args.chunk, budget, deadline):
        rows.append(row)
        timing.write_rows(args.out, rows, **header)
        print(
            f"{row['prompt']} tokens: first token after {row['time_to_first_token_ms']:.1f} ms, "
            f"longest chunk {row['longest_chunk_ms']:.1f} ms",
            file=sys.stderr,
            flush=True,
        )
    return 0


def _workload(text: str) -> tuple[int, int]:
    """Streams, and rows of each in a verify forward."""
    streams, cross, rows = text.rpartition("x")
    if rows.isdecimal() and (streams.isdecimal() if cross else not streams):
        each, total = int(rows), int(rows)
        found = (int(streams), each) if cross else (1, each) if total <= TREE_ROWS else (total // 8, 8)
        if found[0] >= 1 and found[1] >= 1 and (cross or found[0] * found[1] == total):
            return found
    raise argparse.ArgumentTypeError(
        f"expected tokens such as 8, or STREAMSxTOKENS such as 10x8, above {TREE_ROWS} a multiple of 8, not {text!r}"
    )
