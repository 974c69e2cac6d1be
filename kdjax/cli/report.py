"""Figures of a run: as a table for people, as one JSON object for programs. Imports JAX."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kdjax.decode import Completion, Statistics, pool, tau_macro

DEFINITION = (
    "tau: tokens committed per verify pass, bonus included (micro: all tokens / all passes, macro: mean over prompts). "
    "tok/s: without prefill and compilation."
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All prompts in one decoding mode, in their order; one without a token so far (Ctrl-C) has no completion."""

    completions: list[Completion | None]
    slots: list[int | None]

    @property
    def begun(self) -> list[Completion]:
        return [c for c in self.completions if c is not None]

    @property
    def token_ids(self) -> list[list[int]]:
        return [list(c.token_ids) if c else [] for c in self.completions]

    @property
    def statistics(self) -> Statistics:
        return pool([c.statistics for c in self.begun])

    @property
    def decode_seconds(self) -> float:
        """The busiest slot's: a slot is refilled while prompts wait, so the last one to end was never idle."""
        busy: dict[int, float] = collections.defaultdict(float)
        for slot, completion in zip(self.slots, self.completions, strict=True):
            if slot is not None and completion is not None:
                busy[slot] += completion.timings.decode
        return max(busy.values(), default=0.0)

    @property
    def prefill_seconds(self) -> float:
        return sum(c.timings.prefill for c in self.begun)

    @property
    def compile_seconds(self) -> float:
        return max((c.timings.compile for c in self.begun), default=0.0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of verify rounds per second of decoding, all prompts together."""
        seconds = self.decode_seconds
        return self.statistics.emitted / seconds if seconds else 0.0


def identical(outcomes: Mapping[str, Outcome]) -> bool:
    """Whether every decoding mode gave every prompt the same tokens."""
    first, *others = (outcome.token_ids for outcome in outcomes.values())
    return all(other == first for other in others)


def as_json(texts: list[str], outcomes: Mapping[str, Outcome], backend: str) -> dict[str, Any]:
    """The object of `--json`: figures of the first mode, and with several modes their comparison.

    `text` and `token_ids` of several prompts are joined; `streams` has each.
    """
    mode, main = next(iter(outcomes.items()))
    result: dict[str, Any] = {
        "text": "\n".join(texts),
        "new_tokens": sum(map(len, main.token_ids)),
        "tau_micro": main.statistics.tau,
        "tau_macro": tau_macro([c.statistics for c in main.begun]),
        "acceptance_by_depth": list(main.statistics.acceptance_by_depth),
        "decode_tokens_per_s": main.tokens_per_s,
        "backend": backend,
        "mode": mode,
        "prefill_seconds": main.prefill_seconds,
        "compile_seconds": main.compile_seconds,
        "decode_seconds": main.decode_seconds,
        "streams": [{"text": text, **stream} for text, stream in zip(texts, streams(main), strict=True)],
    }
    if len(outcomes) > 1:
        result["identical"] = identical(outcomes)
        result["modes"] = {
            name: {
                "decode_tokens_per_s": outcome.tokens_per_s,
                "tau_micro": outcome.statistics.tau,
                "token_ids": [i for ids in outcome.token_ids for i in ids],
            }
            for name, outcome in outcomes.items()
        }
    return result


def streams(outcome: Outcome) -> list[dict[str, Any]]:
    """One object per prompt; `finish_reason` is None where decoding was interrupted."""
    return [
        {
            "token_ids": list(c.token_ids),
            "rounds": c.statistics.rounds,
            "tau": c.statistics.tau,
            "accepted_by_depth": list(c.statistics.accepted_by_depth),
            "finish_reason": c.finish_reason,
        }
        if c
        else {"token_ids": [], "rounds": 0, "tau": 0.0, "accepted_by_depth": [], "finish_reason": None}
        for c in outcome.completions
    ]


def ending(outcome: Outcome) -> str:
    """Why the texts ended where they do."""
    words = {"length": "at the most new tokens (-n)", "stop": "at an end token", None: "by Ctrl-C"}
    reasons = [c.finish_reason if c else None for c in outcome.completions]
    if len(reasons) == 1:
        tokens = f" after {len(outcome.token_ids[0])} tokens"
        return f"stopped{tokens}, {words[reasons[0]]}"
    counts = collections.Counter(reasons)
    return "stopped: " + ", ".join(f"{count} of {len(reasons)} {words[reason]}" for reason, count in counts.items())


def show(outcomes: Mapping[str, Outcome], backend: str, console: Console, *, interrupted: bool = False) -> None:
    """The table under the text; the compilation in its footer is that of all modes.

    Colours only on a terminal, and not under NO_COLOR.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in outcomes:
        table.add_column(name, justify="right")

    def row(label: str, cells: list[str]) -> None:
        table.add_row(label, *cells)

    columns = list(outcomes.values())
    shares = [o.statistics.acceptance_by_depth for o in columns]
    row("new tokens", [f"{sum(map(len, o.token_ids))}" for o in columns])
    row("verify passes", [f"{o.statistics.rounds}" for o in columns])
    row("tau micro", [f"{o.statistics.tau:.2f}" for o in columns])
    row("tau macro", [f"{tau_macro([c.statistics for c in o.begun]):.2f}" for o in columns])
    for depth in range(max(map(len, shares))):
        row(f"accepted at depth {depth + 1}", [f"{s[depth]:.0%}" if depth < len(s) else "-" for s in shares])
    row("tok/s", [f"{o.tokens_per_s:.1f}" for o in columns])
    if "autoregressive" in outcomes and len(outcomes) > 1:
        base = outcomes["autoregressive"].tokens_per_s
        row("speed-up", [f"{o.tokens_per_s / base:.2f}x" if base else "-" for o in columns])
    console.print(table)
    console.print(DEFINITION, style="dim")
    if len(outcomes) > 1:
        same = identical(outcomes)
        style = "green" if same else "red"
        console.print("tokens of all modes are", "identical" if same else "DIFFERENT", style=style)
    compilation = f"compilation {sum(o.compile_seconds for o in columns):.2f} s"
    if len(columns) > 1:
        compilation += " of all modes"
    console.print(f"backend {backend}; prefill {columns[0].prefill_seconds:.2f} s, {compilation}")
    if interrupted:
        console.print("interrupted: what is shown is what there was so far", style="yellow")
