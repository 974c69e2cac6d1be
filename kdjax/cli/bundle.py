"""Golden bundles: weights, prompts and the tokens that the NumPy reference decodes from them, in one file.

`make` packs a checkpoint and decodes it with the reference, which holds all weights in float64: for small models.
`check` decodes a bundle with JAX; the exit status is 0 where all tokens agree, 1 where some do not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kdjax.bundled.locate import locate
from kdjax.cli import options
from kdjax.cli.interrupt import Interrupt
from kdjax.cli.start import configure_jax
from kdjax.config import ONE_DEVICE, Cluster, load
from kdjax.config.generate import ModelSection, RuntimeSection
from kdjax.errors import KdjaxError

if TYPE_CHECKING:
    from kdjax.evaluate.golden import Result

EXIT_DIVERGED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="make|check", required=True)
    make = actions.add_parser("make", help="decode with the reference and write a bundle", allow_abbrev=False)
    make.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue")
    make.add_argument("--ids", type=_ids, action="append", default=[], metavar="1,2,3", help="a prompt of token ids")
    make.add_argument("--model", default="bundled:nano", metavar="FOLDER", help="target, default %(default)s")
    make.add_argument("--drafter", metavar="FOLDER", help="its drafter; a bundled target has its own")
    make.add_argument("--no-drafter", action="store_true", help="autoregressive decoding only")
    make.add_argument("--budget", type=options.at_least(1), default=15, metavar="N", help="tree nodes, %(default)s")
    make.add_argument(
        "-n", "--max-new-tokens", type=options.at_least(1), default=32, metavar="N", help="default %(default)s"
    )
    make.add_argument(
        "--weights",
        choices=("stored", "dense"),
        default="stored",
        help="keep INT4 experts as they are (default) or expand them to bfloat16",
    )
    make.add_argument("--out", type=Path, required=True, metavar="FILE", help="the bundle to write")
    make.set_defaults(action=_make)

    check = actions.add_parser("check", help="decode with JAX and compare", allow_abbrev=False)
    check.set_defaults(action=_check, overrides=[], typed={})
    check.add_argument("bundle", type=Path, metavar="FILE")
    check.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.0,
        metavar="LOGITS",
        help="accept a divergence where both margins are below this, default 0: none",
    )
    check.add_argument(
        "--set",
        action=options.Override,
        dest="overrides",
        metavar="KEY=VALUE",
        help="numerics, e.g. compute_dtype=bfloat16; keys of [runtime]",
    )
    check.add_argument(
        "--mesh", type=Path, metavar="FILE", help="split the model over devices: configs/meshes/NAME.toml"
    )
    check.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, interrupt: Interrupt) -> int:
    return args.action(args)


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids such as 1,2,3, not {text!r}") from None


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, not {text!r}")
    return value


def _make(args: argparse.Namespace) -> int:
    section = ModelSection(target=args.model, drafter=args.drafter)
    target, drafter = locate(section, needs_drafter=not args.no_drafter)
    if args.out.exists():
        raise KdjaxError(f"{args.out} exists: give another name or remove it")
    if not args.prompts and not args.ids:
        raise KdjaxError("no prompt: give text, or token ids with --ids")
    if not all(args.prompts):
        raise KdjaxError("the prompt is empty: there is nothing to continue")
    from kdjax.checkpoint.bundle import write_bundle
    from kdjax.evaluate.golden import decode_cases
    from kdjax.tokenizer import Tokenizer

    prompts = list(args.ids)
    if args.prompts:
        tokenizer = Tokenizer.from_checkpoint(target)
        prompts += [tokenizer.encode_prompt(text) for text in args.prompts]
    new, budget = args.max_new_tokens, args.budget
    cases = list(decode_cases(target, drafter, prompts, max_new_tokens=new, tree_budget=budget))
    write_bundle(args.out, target, drafter, cases, tree_budget=args.budget, weights=args.weights)
    margin = min(min(case.margins) for case in cases)
    size = args.out.stat().st_size / 1e6
    count = f"{len(cases)} prompt{'s' * (len(cases) > 1)}"
    print(f"{args.out}: {count}, {new} tokens each, smallest margin {margin:.2e} logits, {size:.2f} MB")
    return 0


def _check(args: argparse.Namespace) -> int:
    section = load(RuntimeSection, None, ['compute_dtype="float32"', *args.overrides])
    mesh = load(Cluster, args.mesh).mesh if args.mesh else ONE_DEVICE
    configure_jax(compilation_cache=section.compilation_cache)
    from kdjax.checkpoint.bundle import Bundle
    from kdjax.evaluate import golden
    from kdjax.model.runtime import runtime_of

    results = []
    for result in golden.check(Bundle(args.bundle), runtime_of(section, mesh)):
        results.append(result)
        if not args.json:
            print(_line(result, args.tolerance), flush=True)
    failed = [result for result in results if not result.passes(args.tolerance)]
    if args.json:
        print(json.dumps({"passes": not failed, "results": [dataclasses.asdict(result) for result in results]}))
    else:
        print(f"{len(results) - len(failed)} of {len(results)} agree")
    return EXIT_DIVERGED if failed else 0


def _line(result: Result, tolerance: float) -> str:
    what = f"prompt {result.case}, {result.mode}: "
    if first := result.divergence:
        return what + (
            f"{'a tie' if result.passes(tolerance) else 'DIVERGES'} at new token {first.position}: golden "
            f"{first.golden_token} by a margin of {first.golden_margin:.3e} logits, here {first.token} by "
            f"{first.margin:.3e}"
        )
    said = f"{result.tokens} tokens agree"
    if result.rounds != result.golden_rounds:
        said += (
            f", but accepted drafts {'differ' if result.passes(tolerance) else 'DIFFER'}: golden "
            f"{_counts(result.golden_rounds)}, here {_counts(result.rounds)}"
        )
    elif result.rounds:
        said += f" in {result.rounds[0]} rounds"
    return what + said


def _counts(rounds: tuple[int, ...]) -> str:
    return f"{rounds[0]} rounds with {'/'.join(map(str, rounds[1:]))} by depth"
