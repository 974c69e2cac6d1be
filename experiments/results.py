"""The results page: docs/results.md and its plots, from the files in docs/results.

python -m experiments.results                                            # after a file in docs/results has changed
python -m experiments.results --runs runs/all --note "idle laptop"       # take the runs of that folder in first
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kdjax.errors import KdjaxError
from kdjax.run import plot

DOCS = Path(__file__).parents[1] / "docs"
NANO = "bundled_nano.json"
EXPERIMENTS = "experiments"
GROUPS = ("python", "docs", "prose")
SHOWN = ("git", "versions", "devices", "backend")
"""What of a run's provenance is kept: no path of the machine."""

Rows = Sequence[dict[str, Any]]


class Kind(NamedTuple):
    """A bench whose JSON files are named PREFIX_DEVICE.json: how its rows are shown."""

    title: str
    command: str
    about: str
    columns: dict[str, str]
    draw: Callable[[Rows, Any], None] | None = None


def draw_experts(rows: Rows, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    uniform = [row for row in rows if row["routing"] == "uniform"]
    for style, width in enumerate(sorted({row["intermediate"] for row in uniform})):
        mine = [row for row in uniform if row["intermediate"] == width]
        compared = [row for row in mine if row.get("marlin_us")]
        shares = [row["us"] / row["marlin_us"] for row in compared]
        _line(left, [row["tokens"] for row in compared], shares, style, f"inner {width}")
        _line(right, [row["tokens"] for row in mine], [r["fraction_of_ceiling"] for r in mine], style, f"inner {width}")
    left.axhline(1, color="grey", linewidth=0.8)
    left.set(title="time over Marlin's", ylim=(0, None))
    right.set(title="needed bytes per time, of the read ceiling", ylim=(0, 1))
    _by_size((left, right), uniform, "tokens")


def draw_attention(rows: Rows, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    prefixes_of = Counter((row["heads"], row["streams"], row["tokens"]) for row in rows)
    cases = sorted(case for case, prefixes in prefixes_of.items() if prefixes > 1)
    for style, case in enumerate(cases):
        mine = [row for row in rows if (row["heads"], row["streams"], row["tokens"]) == case]
        mine.sort(key=lambda row: row["prefix"])
        heads, streams, tokens = case
        label = f"{tokens} x {streams}" + (f", {heads} heads" if heads != min(c[0] for c in cases) else "")
        prefixes = [row["prefix"] for row in mine]
        _line(left, prefixes, [row["us"] for row in mine], style, label)
        nearer = [max(row["read_ceiling_fraction"], row["matmul_peak_fraction"]) for row in mine]
        _line(right, prefixes, nearer, style, label)
    left.set(title="microseconds", yscale="log")
    right.set(title="of the nearer limit: read ceiling or matmul peak", ylim=(0, None))
    _by_size((left, right), rows, "prefix")
    left.get_legend().set_title("tokens x streams")


KINDS = {
    "int4_experts": Kind(
        "Routed INT4 experts of a layer",
        "kdjax bench moe --patterns uniform skewed --out {file}",
        "384 experts, hidden 7168, top-8; `us` per call, median; the ceiling is the read rate of the same run. Marlin "
        "is vLLM 0.23's on the same kind of GPU.",
        {
            "intermediate": "inner",
            "routing": "routing",
            "tokens": "tokens",
            "us": "us",
            "marlin_us": "Marlin us",
            "fraction_of_ceiling": "of the read ceiling",
            "relative_error": "relative error",
        },
        draw_experts,
    ),
    "tree_attention": Kind(
        "Attention of a draft tree over a cached context",
        "kdjax bench attention --out {file}",
        "Main kernel, Triton's or Mosaic's as the table of tile sizes says, and merge, arbitrary tree mask; `us` per "
        "call, best of the repetitions. The peer is the best of FlashMLA and FlashAttention-3 with a chain, without a "
        "mask.",
        {
            "heads": "heads",
            "tokens": "tokens",
            "streams": "streams",
            "prefix": "prefix",
            "us": "us",
            "chain_peer_us": "best peer, chain, us",
            "read_ceiling_fraction": "of the read ceiling",
            "matmul_peak_fraction": "of the matmul peak",
        },
        draw_attention,
    ),
    "prefill_attention": Kind(
        "Attention of a prompt's chunk",
        "kdjax bench prefill --out {file}",
        "One tensor-parallel rank's share (8 heads) of a layer; `us` per call, best of the repetitions.",
        {
            "tokens": "tokens",
            "prefix": "prefix",
            "us": "us",
            "tflop_s": "TFLOP/s",
            "matmul_peak_fraction": "of the matmul peak",
        },
    ),
    "tree_build": Kind(
        "Building draft trees",
        "kdjax bench tree --out {file}",
        "Draft logits of 7 depths and 163,840 tokens to nodes, mask and positions; `us` per call, best of repetitions.",
        {
            "streams": "streams",
            "budget": "nodes",
            "us": "us",
            "median_us": "median us",
            "equal_to_reference": "equal to the reference",
        },
    ),
    "step": Kind(
        "A round of decoding, one rank's share of eight devices",
        "kdjax bench step configs/models/kimi-k2.6.toml --rank-of configs/meshes/h200x8.toml --tokens 8 --out {file}",
        "All 61 layers of Kimi K2.6 with random INT4 weights, alone: without all-reduces. The floor is the time of "
        "reading the weights and cache that a verify forward needs. The file has stages and components.",
        {
            "streams": "streams",
            "tokens": "tokens",
            "context": "context",
            "distinct_experts_per_layer": "experts per layer",
            "floor_ms": "verify floor ms",
            "verify_ms": "verify ms",
            "round_ms": "round ms",
        },
    ),
    "ttft": Kind(
        "Time to the first token of a prompt, one rank's share of eight devices",
        "kdjax bench ttft configs/models/kimi-k2.6.toml --rank-of configs/meshes/h200x8.toml --out {file}",
        "All 61 layers of Kimi K2.6 with random INT4 weights, alone: without all-reduces. The longest chunk is what "
        "other streams wait for at most.",
        {
            "prompt": "prompt",
            "chunk": "chunk",
            "time_to_first_token_ms": "first token after ms",
            "longest_chunk_ms": "longest chunk ms",
            "tokens_per_s": "tokens/s",
            "compile_seconds": "compile s",
        },
    ),
    "load": Kind(
        "Loading a checkpoint",
        "python -m experiments.load_speed FOLDER --backend triton  # {file}",
        "Beside a plain sequential read of the same files, page cache dropped before each.",
        {
            "device": "device",
            "gigabytes": "GB",
            "plain_read_gb_per_s": "plain read GB/s",
            "load_gb_per_s": "load GB/s",
            "load_over_plain_read": "of the plain read",
            "waiting_for_reads_s": "reads s",
            "host_to_device_s": "host to device s",
            "layout_s": "layout s",
            "host_peak_over_kept": "host peak over kept",
        },
    ),
    "generate": Kind(
        "The bundled model",
        'kdjax generate "def fibonacci(n):" -n 256 --compare --json  # {file}',
        "bfloat16, INT4 experts packed, Triton kernels; prefill and compilation excluded.",
        {
            "mode": "mode",
            "decode_tokens_per_s": "tokens/s",
            "over_autoregressive": "over autoregressive",
            "tau_micro": "tau micro",
            "identical": "identical",
        },
    ),
}


def page(folder: Path = DOCS / "results") -> str:
    """The text of docs/results.md. Raises KdjaxError where a file of `folder` is not JSON."""
    parts = [
        "# Results\n\nWritten by `python -m experiments.results` from the JSON files in `docs/results`: change those, "
        "not this page. Why the kernels take the time they take: [kernels](kernels.md). What experiments ask, and what "
        "their figures mean: [run](guides/run.md).",
        "## Bundled model, on a CPU",
        _nano(_read(folder / NANO)),
    ]
    runs = sorted((folder / EXPERIMENTS).glob("*.json"))
    if runs:
        parts += [
            "## Experiments, on a CPU",
            "Bundled model, `kdjax run configs/experiments --out runs/all`, or one file of that folder. Brackets are "
            "95 % confidence intervals, bootstrap over prompts or repetitions.",
            *(_experiment(file) for file in runs),
        ]
    parts.append("## On GPUs")
    parts += [_bench(file) for file in sorted(folder.glob("*.json")) if file.name != NANO]
    return "\n\n".join(parts) + "\n"


def draw(folder: Path = DOCS / "results") -> None:
    """The plots that `page` shows; those of experiments are the runs' own."""
    plot.require()
    figure = plot.new_figure()
    _draw_nano(_read(folder / NANO)["acceptance"], figure)
    plot.save(figure, folder / "tau_by_budget.png")
    for file in sorted(folder.glob("*.json")):
        kind = _kind(file)
        if kind and kind.draw:
            figure = plot.new_figure()
            kind.draw(_read(file)["rows"], figure)
            plot.save(figure, file.with_suffix(".png"))


def take(runs: Path, note: str, folder: Path = DOCS / "results") -> None:
    """Copies what the page shows of every finished run below `runs`: summary, plot, and provenance without paths.

    Raises KdjaxError where no run is finished.
    """
    finished = sorted(file.parent for file in [*runs.glob("summary.json"), *runs.glob("*/summary.json")])
    if not finished:
        raise KdjaxError(f"{runs} holds no finished run of kdjax run: give the folder that its --out named")
    (folder / EXPERIMENTS).mkdir(parents=True, exist_ok=True)
    for run in finished:
        summary, provenance = _read(run / "summary.json"), _read(run / "provenance.json")
        kept = {key: provenance[key] for key in SHOWN}
        weights = {role: entry["fingerprint"] for role, entry in provenance["checkpoints"].items()}
        out = folder / EXPERIMENTS / f"{run.name}.json"
        record = {**summary, "note": note, "provenance": {**kept, "checkpoints": weights}}
        out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if (run / "plot.png").exists():
            shutil.copyfile(run / "plot.png", out.with_suffix(".png"))


def _nano(result: dict[str, Any]) -> str:
    rows = []
    for cell, domains in result["acceptance"].items():
        mode, budget, temperature = cell.split("-", 2)
        found = [domains.get(group, {}).get("without_loops") for group in GROUPS]
        taus = [None if one is None else one[key] for one in found for key in ("tau_micro", "tau_macro")]
        rows.append(
            [mode, budget, temperature.removeprefix("T"), *("-" if tau is None else f"{tau:.2f}" for tau in taus)]
        )
    rows.sort(key=lambda row: (row[2], row[0], int(row[1])))
    head = ["mode", "nodes", "T", *(f"{group}, {kind}" for group in GROUPS for kind in ("micro", "macro"))]
    s = result["settings"]
    return "\n\n".join(
        [
            f"tau, tokens per verify pass, bonus included (micro: all tokens over all passes; macro: mean over prompts)"
            f" of the kinds of held-out text; {s['prompts']} prompts of {s['prompt_len']} tokens per domain, "
            f"{s['new_tokens']} new tokens each, outputs that loop left out. float32, {result['devices'][0]}, jax "
            f"{result['jax']}; tokens do not depend on the machine or its load.",
            _command(f"python -m experiments.nano evaluate configs/experiments/nano.toml --out runs/nano  # {NANO}"),
            _table(head, rows),
            "![tau by tree nodes](results/tau_by_budget.png)",
            "By domain, with bits per byte beside compressors and acceptance by depth: the model's card, "
            "`kdjax/bundled/nano/README.md`.",
        ]
    )


def _experiment(file: Path) -> str:
    summary = _read(file)
    metrics = [name for name in summary["metrics"] if any(name in cell for cell in summary["cells"].values())]
    rows = [[cell, *(_estimate(of.get(name)) for name in metrics)] for cell, of in summary["cells"].items()]
    git = summary["provenance"]["git"] or {"commit": "unknown", "dirty": False}
    where = ", ".join(
        [
            *summary["provenance"]["devices"],
            f"jax {summary['provenance']['versions']['jax']}",
            f"revision {git['commit'][:10]}{' with changes' if git['dirty'] else ''}",
        ]
    )
    image = f"{EXPERIMENTS}/{file.stem}.png"
    return "\n\n".join(
        [
            f"### {file.stem}",
            f"Published: {summary['claim']}",
            _table(["cell", *metrics], rows),
            "\n".join(f"- `{name}`: {summary['metrics'][name].get('definition') or name}" for name in metrics),
            *([f"![{file.stem}](results/{image})"] if (file.with_suffix(".png")).exists() else []),
            "Found here:",
            "\n".join(f"- {finding}" for finding in summary["findings"]),
            f"{where}. {summary['note']}".strip(),
        ]
    )


def _bench(file: Path) -> str:
    result, kind = _read(file), _kind(file)
    rows: Rows = result["rows"]
    columns = kind.columns if kind else {key: key.replace("_", " ") for row in rows for key in row if _shown(row[key])}
    columns = {key: title for key, title in columns.items() if any(row.get(key) is not None for row in rows)}
    shown = {key: value for key, value in result.items() if _shown(value) and key != "text"}
    header = [f"{key.replace('_', ' ')} {_number(value)}" for key, value in shown.items()]
    title = f"{kind.title}, {result.get('device', file.stem)}" if kind else file.stem.replace("_", " ")
    return "\n\n".join(
        [
            f"### {title}",
            *([kind.about] if kind else []),
            *([_command(kind.command.format(file=f"docs/results/{file.name}"))] if kind else []),
            _table(list(columns.values()), [[_number(row.get(key)) for key in columns] for row in rows]),
            *([f"![{title}](results/{file.stem}.png)"] if kind and kind.draw else []),
            *(["\n".join(f"- {finding}" for finding in result["findings"])] if "findings" in result else []),
            f"[{file.name}](results/{file.name}): {'; '.join(header)}.",
        ]
    )


def _kind(file: Path) -> Kind | None:
    return next((kind for prefix, kind in KINDS.items() if file.name.startswith(f"{prefix}_")), None)


def _shown(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _draw_nano(acceptance: dict[str, Any], figure: Any) -> None:
    """tau micro at T = 0 by tree nodes, with plain DFlash as a dotted line of the same colour."""
    axes = figure.subplots()
    budgets = sorted(
        int(cell.split("-")[1]) for cell in acceptance if cell.startswith("tree-") and cell.endswith("-T0")
    )
    for style, group in enumerate(GROUPS):
        taus = [acceptance[f"tree-{budget}-T0"][group]["without_loops"]["tau_micro"] for budget in budgets]
        _line(axes, budgets, taus, style, f"{group}, tree")
        for cell in (cell for cell in acceptance if cell.startswith("chain-") and cell.endswith("-T0")):
            tau = acceptance[cell][group]["without_loops"]["tau_micro"]
            axes.axhline(tau, color=plot.STYLES[style][0], linestyle=":", label=f"{group}, {cell.split('-')[0]}")
    axes.set(title="bundled model, held-out text, T = 0, loops left out", ylabel="tau, tokens per verify pass")
    axes.set(xlabel="tree nodes", ylim=(1, None))
    plot.log_x(axes, budgets)
    axes.legend(ncols=3, fontsize=9, loc="lower right")


def _line(axes: Any, x: Sequence[Any], values: Sequence[float], style: int, label: str) -> None:
    color, marker, dashes = plot.STYLES[style % len(plot.STYLES)]
    axes.plot(x, values, color=color, marker=marker, linestyle=dashes, label=label)


def _by_size(panels: Sequence[Any], rows: Rows, key: str) -> None:
    """A logarithmic x axis in every panel; half a figure has room for every other size."""
    ticks: list[int] = []
    for size in sorted({row[key] for row in rows}):
        if not ticks or size >= 2.5 * ticks[-1]:
            ticks.append(size)
    for axes in panels:
        plot.log_x(axes, ticks)
        axes.set_xlabel(key)
        axes.legend(fontsize=8)


def _command(text: str) -> str:
    return f"```\n{text}\n```"


def _estimate(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    interval = "" if found["low"] is None else f" [{found['low']:.3g}, {found['high']:.3g}]"
    return f"{found['value']:.4g}{interval}"


def _number(value: Any, digits: int = 3) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---", *["---:"] * (len(head) - 1)], *rows))


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KdjaxError(f"{file} is not readable JSON ({error}): restore it") from None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.results", description=__doc__)
    parser.add_argument("--runs", type=Path, metavar="DIR", help="folder of kdjax run --out; its runs are taken in")
    parser.add_argument("--note", default="", help="what else ran on the machine, for the runs that are taken in")
    args = parser.parse_args(argv)
    if args.runs:
        take(args.runs, args.note)
    draw()
    (DOCS / "results.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
