"""The decode step, measured: whole rounds, their stages, the parts of a verify forward, and how far off its floor."""

from __future__ import annotations

import functools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kdjax.bench import stages, trace
from kdjax.bench.stages import Stage, Work
from kdjax.bench.subject import SLACK, Subject
from kdjax.config import DeviceConfig
from kdjax.decode import loop
from kdjax.decode.drafting import Params
from kdjax.decode.state import DecodeState, Reason
from kdjax.errors import KdjaxError
from kdjax.plan.compiled import COLLECTIVES
from kdjax.plan.memory import Workload, memory
from kdjax.plan.step import Step, step
from kdjax.sharding import shardings
from pallas_kernels import timing

ACCEPTANCE = (1.0, 3.0, 4.5, 5.5)
TRACED_ROUNDS = 8
CHAIN, BETWEEN, ALONE = "exchanges", "between exchanges", "verify without exchanges"
"""Measurements of the part `exchanges`."""
LEAST_MS = 1e-4
"""The last digit that rows keep: rates over a time of zero have no value."""
FLOOR = (
    "read_ceiling_gb_s",
    "distinct_experts_per_layer",
    "distinct_experts_are",
    "needed_bytes",
    "floor_ms",
    "round_floor_ms",
)
"""Values of a row that are known without a measurement, and better with one of a verify forward."""


class Settings(NamedTuple):
    """`component_layers` MoE layers are measured for the parts of a verify forward, and scaled to all.

    `threads` compile; a measurement runs for about `ms`, `repetitions` times. `trace` is the folder for profiles of
    some rounds, None for none.
    """

    parts: tuple[str, ...]
    component_layers: int = 8
    threads: int = 16
    trace: Path | None = None
    ms: float = 150.0
    repetitions: int = 5
    ceiling_bytes: int = 2**31


class Case(NamedTuple):
    """One row: its programs and what they run on."""

    workload: Workload
    program: loop.Program
    state: DecodeState
    work: Work
    stages: dict[str, Stage | None]
    """None is the round, which runs as the program of a `kdjax.decode.Decoder`."""
    alone: Case | None = None
    """The verify forward of the first device of a mesh alone, which is the one without its exchanges."""

    @property
    def name(self) -> str:
        return f"{self.workload.streams}x{self.workload.budget + 1}"


class Progress(NamedTuple):
    """All rows so far, and what was measured last."""

    rows: list[dict[str, Any]]
    case: str
    stage: str
    ms: float


def measure(
    subject: Subject, workloads: Sequence[Workload], device: DeviceConfig | None, settings: Settings, deadline: float
) -> Iterator[Progress]:
    """The rows after every measurement. Everything is compiled before anything is measured.

    `device` says what exchanges cost, where there is one. No measurement starts after `deadline`, on the clock of
    `time.monotonic`.

    Raises:
        KdjaxError: a program would talk to the host, or something does not fit.
    """
    params = subject.params()
    jax.block_until_ready(params)
    cases = [_case(subject, workload, settings) for workload in workloads]
    rank, own = subject, params
    if "exchanges" in settings.parts and subject.exchanges and not subject.runtime.mesh.cache_axes:
        rank, own = subject.rank(), subject.share_of_rank(params)
        verify = settings._replace(parts=("verify",))
        cases = [case._replace(alone=_case(rank, case.workload, verify)) for case in cases]
    jobs = [(case, name, name, params) for case in cases for name in case.stages]
    jobs += [(case.alone, "verify", ALONE, own) for case in cases if case.alone is not None]
    calls = [functools.partial(_compile, case, stage, held) for case, stage, _, held in jobs]
    programs: dict[tuple[Workload, str], Compiled] = {}
    for (case, _, name, _), each in zip(jobs, timing.compile_all(calls, threads=settings.threads), strict=True):
        if isinstance(each, Exception):
            raise each
        programs[case.workload, name] = each
    ceiling = timing.read_ceiling(settings.ceiling_bytes)
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append({})
        runner = _Runner(subject, case, _params_of(case, params), settings)
        times: dict[str, float] = {}
        facts: dict[str, Compiled] = {}
        for name in case.stages:
            if time.monotonic() > deadline:
                return
            times[name] = runner.ms(name, programs[case.workload, name].executable)
            facts = {key: programs[case.workload, key] for key in case.stages if key in times}
            rows[-1] = _row(subject, case, runner, times, facts, device, ceiling)
            yield Progress(rows, case.name, name, times[name])
        if case.alone is not None:
            if time.monotonic() > deadline:
                return
            one = _Runner(rank, case.alone, _params_of(case.alone, own), settings)
            times[ALONE] = one.ms("verify", programs[case.workload, ALONE].executable)
            rows[-1] = _row(subject, case, runner, times, facts, device, ceiling)
            yield Progress(rows, case.name, ALONE, times[ALONE])
        if settings.trace is not None and "round" in times:
            executable = programs[case.workload, "round"].executable
            rows[-1]["idle"] = runner.traced(executable, settings.trace / case.name)
            yield Progress(rows, case.name, "round", times["round"])


def _params_of(case: Case, params: Params) -> Params:
    return params if case.program.drafting is not None else params._replace(drafter=None)


def _case(subject: Subject, workload: Workload, settings: Settings) -> Case:
    program = subject.program(workload.budget)
    make = functools.partial(stages.make_work, program, workload.streams)
    key = jax.random.key(2)
    where = None
    if program.mesh is not None:
        where = shardings(stages.work_specs(program), program.mesh)
    work = jax.jit(make, out_shardings=where)(key)
    return Case(workload, program, subject.state(workload), work, _stages(program, settings, subject.exchanges))


def _stages(program: loop.Program, settings: Settings, exchanged: bool) -> dict[str, Stage | None]:
    """By name, in the order of measurement: what matters most comes first."""
    parts, c = settings.parts, program.model
    chosen: dict[str, Stage | None] = {}
    if "round" in parts or "trace" in parts:
        chosen["round"] = None
    exchanges = "exchanges" in parts and exchanged
    if "verify" in parts or exchanges:
        chosen["verify"] = stages.verify
    if exchanges:
        chosen |= {name: functools.partial(stages.exchanges, name == CHAIN) for name in (CHAIN, BETWEEN)}
    if "stages" in parts:
        drafting = {"draft": stages.draft, "tree": stages.build} if program.drafting is not None else {}
        chosen |= {**drafting, "accept": stages.accept, "commit": stages.commit}
    if "components" in parts:
        moe = [layer for layer in range(c.num_hidden_layers) if c.is_moe(layer)]
        dense = tuple(layer for layer in range(c.num_hidden_layers) if not c.is_moe(layer))
        some = tuple(moe[: settings.component_layers])
        every = some or dense[: settings.component_layers]
        chosen |= {"mla": _over(stages.mla, every), "attention": _over(stages.attention, every)}
        if some:
            chosen["experts"] = _over(stages.experts, some)
            if c.n_shared_experts:
                chosen["shared"] = _over(stages.mlp, some)
        if dense:
            chosen["dense"] = _over(stages.mlp, dense)
        chosen["lm_head"] = stages.lm_head
    return chosen


def _over(component: Callable[..., Any], layers: tuple[int, ...]) -> Any:
    return functools.partial(component, layers)


class Compiled(NamedTuple):
    executable: Any
    seconds: float
    collectives: dict[str, int]
    workspace: int


def _compile(case: Case, name: str, params: Params) -> Compiled:
    began = time.perf_counter()
    params, stage, times = _params_of(case, params), case.stages[name], np.int32(1)
    if stage is None:
        lowered = loop.decode.lower(case.program, params, case.state, times, np.int32(1))
    else:
        lowered = stages.repeat.lower(case.program, stage, params, case.state, case.work, times)
    executable = lowered.compile()
    seconds = time.perf_counter() - began
    text = executable.as_text() or ""
    if found := host_exchanges(text):
        raise KdjaxError(f"the compiled stage {name} talks to the host ({', '.join(found)}): no round may")
    used = executable.memory_analysis()
    return Compiled(
        executable,
        round(seconds, 1),
        {kind: n for kind in COLLECTIVES if (n := len(re.findall(rf" {kind}(?:-start)?\(", text)))},
        0 if used is None else used.temp_size_in_bytes,
    )


def host_exchanges(text: str) -> list[str]:
    """Instructions of a compiled program that wait for the host or call it."""
    return sorted(
        set(re.findall(r" (infeed|outfeed|send|recv)\(", text))
        | set(re.findall(r'custom_call_target="([^"]*[cC]allback[^"]*)"', text))
    )


class _Runner:
    """Runs compiled stages of one case, each on what the one before left."""

    def __init__(self, subject: Subject, case: Case, params: Params, settings: Settings):
        self.subject, self.case, self.params, self.settings = subject, case, params, settings
        self.state, self.work = case.state, case.work

    def run(self, name: str, executable: Any, times: int) -> float:
        """Milliseconds. What is committed is forgotten before; nothing moves between host and devices meanwhile."""
        self.state = self.subject.rewound(self.state, self.case.workload)
        count, one = self.subject.on_devices((jnp.int32(times), jnp.int32(1)))
        jax.block_until_ready((self.state, self.work, count, one))
        with jax.transfer_guard("disallow"):
            began = time.perf_counter()
            if self.case.stages[name] is None:
                self.state, _ = executable(self.params, self.state, count, one)
            else:
                self.state, self.work = executable(self.params, self.state, self.work, count)
            jax.block_until_ready((self.state, self.work))
            return (time.perf_counter() - began) * 1e3

    def ms(self, name: str, executable: Any) -> float:
        """Of one repetition: long and short runs differ by repetitions alone, not by what starting costs.

        Raises:
            KdjaxError: a stream ended, so that rounds were not run.
        """
        self.run(name, executable, 1)
        once = max(self.run(name, executable, 4) - self.run(name, executable, 2), 1e-3) / 2
        most = SLACK // (self.case.program.depth + 1)  # then caches would be full
        long = min(max(int(self.settings.ms / once), 4), most)
        short = max(long // 4, 1)
        runs = [
            (self.run(name, executable, long), self.run(name, executable, short))
            for _ in range(self.settings.repetitions)
        ]
        if (ended := np.asarray(self.state.reason) != Reason.RUNNING).any():
            raise KdjaxError(
                f"{int(ended.sum())} streams ended while {name} was measured: use weights that stay finite"
            )
        # On a busy host a short stage may seem to take no time, or less.
        return max(statistics.median(a - b for a, b in runs) / (long - short), LEAST_MS)

    def traced(self, executable: Any, folder: Path) -> list[dict[str, Any]]:
        """How idle each device was in some rounds."""
        with trace.recording(folder):
            self.run("round", executable, TRACED_ROUNDS)
        found = []
        for device in trace.idle(folder):
            gaps = [{**gap._asdict(), "us": round(gap.us, 2), "at_us": round(gap.at_us, 1)} for gap in device.gaps]
            rounded = {"span_ms": round(device.span_us / 1e3, 4), "idle_fraction": round(device.fraction, 4)}
            found.append({"device": device.device, "rounds": TRACED_ROUNDS, **rounded, "gaps": gaps})
        return found

    def experts_read(self) -> tuple[float, float] | None:
        """Per MoE layer of the last verify forward: distinct experts, and those on this or the busiest device."""
        if self.work.routing is None or "verify" not in self.case.stages:
            return None
        c, parts = self.case.program.model, self.case.program.runtime.mesh.expert
        here = c.n_routed_experts // parts
        distinct, read = [], []
        for layer in np.asarray(self.work.routing):
            used = np.unique(layer)
            each = np.bincount(used // here, minlength=parts)
            distinct.append(len(used))
            read.append(each[0] if self.subject.rank_of else each.max())
        return float(np.mean(distinct)), float(np.mean(read))


def _row(
    subject: Subject,
    case: Case,
    runner: _Runner,
    times: dict[str, float],
    compiled: dict[str, Compiled],
    device: DeviceConfig | None,
    ceiling: float,
) -> dict[str, Any]:
    workload, mesh = case.workload, case.program.runtime.mesh
    experts = runner.experts_read() if "verify" in times else None
    needed = step(
        subject.pair, mesh, workload, memory(subject.pair, mesh, workload), None if experts is None else experts[1]
    )
    row: dict[str, Any] = {
        "tokens": workload.tokens,
        "streams": workload.streams,
        "budget": workload.budget,
        "context": workload.context,
        "read_ceiling_gb_s": round(ceiling, 1),
        "distinct_experts_per_layer": round(needed.distinct_experts if experts is None else experts[0], 2),
        "distinct_experts_are": "expected" if experts is None else "measured",
        "needed_bytes": {**needed.reads, "verify": needed.verify_bytes, "round": needed.bytes},
        "floor_ms": _ms(needed.verify_bytes / ceiling * 1e-6),
        "round_floor_ms": _ms(needed.bytes / ceiling * 1e-6),
    }
    if "round" in times:
        row["round_ms"] = _ms(times["round"])
        row |= _rates(subject, workload, times["round"], needed, device)
    if "verify" in times:
        row["verify_ms"] = _ms(times["verify"])
        row["verify_over_floor"] = round(times["verify"] / row["floor_ms"], 3)
        row["verify_read_ceiling_fraction"] = round(row["floor_ms"] / times["verify"], 3)
    if BETWEEN in times:
        row["exchanges"] = _exchanges(times, needed, device)
    row["stages_ms"] = {n: _ms(times[n]) for n in ("draft", "tree", "verify", "accept", "commit") if n in times}
    row["verify_components_ms"] = _components(case, times)
    if "round" in times:
        row["round_program"] = {
            "compile_seconds": compiled["round"].seconds,
            "workspace_bytes": compiled["round"].workspace,
            "collectives": compiled["round"].collectives,
        }
    return row | _differences(row)


def _exchanges(times: dict[str, float], needed: Step, device: DeviceConfig | None) -> dict[str, Any]:
    """All-reduces of a verify forward: one after the other and nothing else, and as the mesh file predicts them."""
    (count, message), *_ = needed.all_reduces
    predicted = None if device is None else device.all_reduce_ms(message)
    return {
        "all_reduces": count,
        "message_bytes": message,
        "predicted_us": None if predicted is None else _us(predicted),
        "chained_us": _us((times[CHAIN] - times[BETWEEN]) / count),
        "verify_without_ms": _ms(times[ALONE]) if ALONE in times else None,
    }


def _differences(row: dict[str, Any]) -> dict[str, Any]:
    """What follows from several measurements of a row, which may be of different runs."""
    found: dict[str, Any] = {}
    stages_ms, components = row["stages_ms"], row["verify_components_ms"]
    if "round_ms" in row and "verify_ms" in row:
        found["round_over_verify"] = round(row["round_ms"] / row["verify_ms"], 3)
    without = row.get("exchanges", {}).get("verify_without_ms")
    if "verify_ms" in row and without is not None:
        each = _us((row["verify_ms"] - without) / row["exchanges"]["all_reduces"])
        found["exchanges"] = row["exchanges"] | {"in_verify_us": each}
    if "round_ms" in row and {"verify", "accept", "commit"} <= stages_ms.keys():
        found["round_less_stages_ms"] = _ms(row["round_ms"] - sum(stages_ms.values()))
    if "verify_ms" in row and "lm_head" in components:
        parts = {name: value for name, value in components.items() if name != "other"}
        found["verify_components_ms"] = {**parts, "other": _ms(row["verify_ms"] - sum(parts.values()))}
    return found


def _ms(value: float) -> float:
    return round(value, 4)


def _us(milliseconds: float) -> float:
    return round(milliseconds * 1e3, 2)


def _rates(
    subject: Subject, workload: Workload, round_ms: float, needed: Step, device: DeviceConfig | None
) -> dict[str, Any]:
    """Tokens per second of all streams; for a rank alone, with the exchanges added that it does not do."""
    exchanges = None if device is None else needed.all_reduce_ms(device)
    counted = subject.rank_of is not None
    total = round_ms + (exchanges or 0.0 if counted else 0.0)
    return {
        "all_reduce_ms": None if exchanges is None else _ms(exchanges),
        "all_reduce_is": "predicted from the mesh file, not run; in tokens_per_s" if counted else "predicted; run",
        "tokens_per_s": {f"{a:g}": round(1e3 * workload.streams * a / total, 1) for a in ACCEPTANCE},
    }


def _components(case: Case, times: dict[str, float]) -> dict[str, float]:
    """Those that were measured, scaled from some layers to all; nothing before the last of them is."""
    if "lm_head" not in times:
        return {}
    c = case.program.model
    moe = sum(c.is_moe(layer) for layer in range(c.num_hidden_layers))

    def scaled(name: str, layers: int) -> float:
        measured = case.stages[name].args[0]  # type: ignore[attr-defined]
        return times[name] * layers / len(measured) if measured else 0.0

    found = {
        "attention": scaled("attention", c.num_hidden_layers),
        "projections": scaled("mla", c.num_hidden_layers) - scaled("attention", c.num_hidden_layers),
        "experts": scaled("experts", moe) if "experts" in times else 0.0,
        "shared_dense": (scaled("shared", moe) if "shared" in times else 0.0) + times.get("dense", 0.0),
        "lm_head": times["lm_head"],
    }
    return {name: _ms(value) for name, value in found.items()}


def kept_rows(path: Path, header: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run of the same subject, so that a large measurement can be made in several.

    Raises:
        KdjaxError: the file is of another subject or device, or no file of this bench.
    """
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = found["rows"]
    except (ValueError, TypeError, KeyError):
        raise KdjaxError(f"{path} is not a result of kdjax bench step: give another --out or remove it") from None
    if differ := [key for key in header if found.get(key) != json.loads(json.dumps(header[key]))]:
        raise KdjaxError(f"{path} was measured with another {', '.join(differ)}: give another --out or remove it")
    return rows


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by workload. What was measured again replaces what was there, value by value; nothing else is lost."""
    by = {_workload(row): row for row in old}
    for row in new:
        if row:
            before = by.get(_workload(row))
            by[_workload(row)] = row if before is None else _joined(before, row)
    return [by[key] for key in sorted(by)]


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    joined = old | new
    for name in ("stages_ms", "verify_components_ms"):
        joined[name] = old.get(name, {}) | new[name]
    if "verify_ms" in old and "verify_ms" not in new:
        # The floor belongs to the forward: to its experts, which are counted, and to the ceiling of that run.
        joined |= {name: old[name] for name in FLOOR}
    return joined | _differences(joined)


def _workload(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["context"], row["tokens"], row["streams"]
