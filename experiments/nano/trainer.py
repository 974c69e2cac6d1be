"""The loop that target and drafter training share: phases, wall-clock or step progress, logs, resumable state."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from rich.console import Console

from experiments.nano.config import Phase, TrainConfig
from experiments.nano.optim import optimizer, schedule
from experiments.nano.state import load_tree, save_tree
from kdjax.errors import KdjaxError

LossFn = Callable[[Any, Any, Array, Phase], tuple[Float[Array, ""], tuple[Any, dict[str, Array]]]]


class TrainState(NamedTuple):
    """`extra` is trained state without a gradient (the router bias); `step` counts optimizer steps."""

    params: Any
    extra: Any
    optimizer: optax.OptState
    step: Int[Array, ""]


def train(
    config: TrainConfig,
    params: Any,
    extra: Any,
    loss_fn: LossFn,
    folder: pathlib.Path,
    evaluate: Callable[[Any, Any], dict[str, float]],
    context: Any,
) -> TrainState:
    """Runs `config`, writing `metrics.jsonl` and `state.safetensors` under `folder`; continues an interrupted run.

    `loss_fn(params, (extra, context), key, phase)` returns the loss and (new extra, metrics). `context` holds large
    constant arrays (tokens, frozen weights), passed as an argument so that they are not baked into the program.
    """
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    tx = optimizer(config.optimizer)
    state = TrainState(params, extra, jax.jit(tx.init)(params), jnp.zeros((), jnp.int32))
    saved = folder / "state.safetensors"
    elapsed_before = 0.0
    progress_file = folder / "progress.json"
    if saved.exists():
        state = jax.tree.map(jnp.asarray, load_tree(saved, state))
        elapsed_before = json.loads(progress_file.read_text())["seconds"]
        console.print(f"continuing from step {int(state.step)}")

    def one_step(state: TrainState, context: Any, key: Array, progress: Array, phase: Phase):
        grad_fn = jax.value_and_grad(lambda p: loss_fn(p, (state.extra, context), key, phase), has_aux=True)
        (loss, (new_extra, metrics)), grads = grad_fn(state.params)
        factor = schedule(config.optimizer, progress)
        updates, opt_state = tx.update(grads, state.optimizer, state.params)
        new_params = optax.apply_updates(state.params, jax.tree.map(lambda u: u * factor, updates))
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), **metrics}
        return TrainState(new_params, new_extra, opt_state, state.step + 1), metrics

    def chunk(phase: Phase):
        def run(state: TrainState, context: Any, key: Array, progress: Array):
            def body(carry, i):
                return one_step(carry, context, jax.random.fold_in(key, carry.step), progress, phase)

            state, metrics = jax.lax.scan(body, state, jnp.arange(config.log_every))
            return state, jax.tree.map(jnp.mean, metrics)

        return jax.jit(run, donate_argnums=0)

    key = jax.random.key(config.seed)
    zero = jnp.zeros((), jnp.float32)
    opened = time.monotonic()
    lowered = [chunk(phase).lower(state, context, key, zero) for phase in config.phases]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = dict(zip(config.phases, pool.map(lambda program: program.compile(), lowered), strict=True))
    start = time.monotonic()
    console.print(f"compiled {len(programs)} programs in {start - opened:.1f} s")
    # Progress counts training time only, so that the schedule is whole however long compilation took.
    total = None if config.minutes is None else config.minutes * 60 - (start - opened)
    if total is not None and total <= 0:
        raise KdjaxError(
            f"compilation alone took {start - opened:.0f} s of minutes={config.minutes}: give more minutes"
        )
    next_evaluation = config.evaluate_every_seconds

    def write(record: dict[str, Any]) -> None:
        with (folder / "metrics.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        console.print(" ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()))

    while True:
        elapsed = elapsed_before + time.monotonic() - start
        step = int(state.step)
        progress = elapsed / total if total is not None else step / (config.steps or 1)
        if progress >= 1.0:
            break
        phase = next(p for p in config.phases if progress < p.until)
        state, metrics = programs[phase](state, context, key, jnp.asarray(progress, jnp.float32))
        if (step // config.log_every) % 10 == 0:
            record = {k: float(v) for k, v in metrics.items()}
            tokens = phase.batch * phase.seq_len * config.log_every
            seconds = elapsed_before + time.monotonic() - start - elapsed
            write({"step": step, "seconds": elapsed, "progress": progress, **record, "tokens_per_s": tokens / seconds})
            if not np.isfinite(record["loss"]):
                raise FloatingPointError(f"loss is {record['loss']} at step {step}: lower the learning rate")
        if elapsed > next_evaluation:
            next_evaluation = elapsed + config.evaluate_every_seconds
            write({"step": step, "seconds": elapsed, **evaluate(state.params, (state.extra, context))})
            save_tree(saved, state)
            progress_file.write_text(json.dumps({"seconds": elapsed}))
    write({"step": int(state.step), "seconds": elapsed, **evaluate(state.params, (state.extra, context)), "done": True})
    save_tree(saved, state)
    progress_file.write_text(json.dumps({"seconds": elapsed}))
    return state
