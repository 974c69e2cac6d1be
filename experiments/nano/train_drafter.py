"""Stage 3: the DFlash drafter, against the frozen INT4 target's own distribution."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.nano import draft_network, network, self_generate
from experiments.nano.config import Attention, NanoConfig, Phase
from experiments.nano.data import domain_shares, read_corpus, windows
from experiments.nano.state import load_dict, save_tree
from experiments.nano.trainer import train
from kdjax.bundled.locate import locate
from kdjax.checkpoint import load_drafter
from kdjax.config.generate import ModelSection
from kdjax.errors import KdjaxError
from kdjax.evaluate.loops import looping
from kdjax.model.runtime import Runtime


def block_logits(
    config: NanoConfig, drafter: Any, target: Any, bias: Array, tokens: Array, anchors: Array, attention: Attention
) -> tuple[Float[Array, "batch blocks slot vocab"], Float[Array, "batch blocks slot vocab"]]:
    """Drafter and target logits of the tokens at anchor + 1 .. anchor + block - 1, given the text `tokens`."""
    size = config.drafter.block_size
    out = network.forward(config.target, target, bias, tokens, int4=False, attention_implementation=attention)
    taps = jnp.concatenate([out.residuals[i] for i in config.drafter.target_layer_ids], -1)
    rows = jnp.arange(tokens.shape[0])[:, None]
    root = tokens[rows, anchors]
    mask = jnp.full((*anchors.shape, size - 1), config.drafter.mask_token_id)
    block = target["embed_tokens"]["weight"][jnp.concatenate([root[..., None], mask], -1)]
    hidden = draft_network.forward(config.drafter, drafter, taps, anchors, block)
    before = anchors[..., None] + jnp.arange(size - 1)
    target_hidden = out.hidden[rows[..., None], before]
    return network.logits(target, hidden), network.logits(target, target_hidden)


def draft_loss(
    draft: Float[Array, "*blocks slot vocab"],
    teacher: Float[Array, "*blocks slot vocab"],
    gamma: float,
    temperature: float,
) -> Float[Array, ""]:
    """Cross entropy to softmax(teacher / temperature), slot k weighted exp(-(k-1)/gamma) (DFlash, section 3.3)."""
    ce = -jnp.sum(jax.nn.softmax(teacher / temperature) * jax.nn.log_softmax(draft), -1)
    weight = jnp.exp(-jnp.arange(ce.shape[-1]) / gamma)
    return jnp.mean(jnp.sum(ce * weight, -1)) / jnp.sum(weight)


def loss_fn(
    config: NanoConfig, attention: Attention, params: Any, state: Any, key: Array, phase: Phase
) -> tuple[Float[Array, ""], tuple[Any, dict[str, Array]]]:
    """`draft_loss` at random anchors of random windows."""
    draw, place = jax.random.split(key)
    extra, (target, bias, data) = state
    tokens = data.sample(draw, phase.batch, phase.seq_len)
    size = config.drafter.block_size
    anchors = config.train_drafter.anchors * phase.seq_len // 512
    anchor = jax.random.randint(place, (phase.batch, anchors), 1, phase.seq_len - size)
    draft, teacher = block_logits(config, params, target, bias, tokens, anchor, attention)
    loss = draft_loss(draft, teacher, config.train_drafter.gamma, config.train_drafter.teacher_temperature)
    same = jnp.argmax(draft, -1) == jnp.argmax(teacher, -1)
    accuracy = jnp.mean(same.astype(jnp.float32), (0, 1))
    run = jnp.mean(jnp.sum(jnp.cumprod(same.astype(jnp.float32), -1), -1)) + 1.0
    return loss, (extra, {"slot1": accuracy[0], "slot3": accuracy[2], "slot7": accuracy[-1], "tau": run})


def first_params(config: NanoConfig) -> Any:
    """The weights that training begins with: random ones, or those of the checkpoint `train_drafter.start`.

    Raises KdjaxError for an unusable checkpoint, or one of another shape than `drafter`.
    """
    start = config.train_drafter.start
    if start is None:
        return draft_network.init_params(config.drafter, jax.random.key(config.train_drafter.train.seed))
    source = locate(ModelSection(target=config.evaluate.model.target, drafter=start), needs_drafter=True)[1]
    assert source is not None
    loaded = load_drafter(source, Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16"), config.target)
    if loaded.config != config.drafter:
        raise KdjaxError(f"train_drafter.start={start!r} has another shape than [drafter]: give one of its shape")
    return jax.tree.map(lambda w: w.astype(jnp.float32), loaded.params)


def run(config: NanoConfig, folder: pathlib.Path) -> None:
    """Reads `folder/target.safetensors`; writes `folder/drafter.safetensors`."""
    first = first_params(config)
    frozen = load_dict(folder / "target.safetensors")
    target, bias = jax.tree.map(jnp.asarray, network.thaw(config.target, frozen))
    corpus = read_corpus(config.data, "train")
    shares = domain_shares(config.data, corpus.bytes)
    own = self_generate.run(config, folder, target, bias, windows(corpus.tokens, shares))
    share = config.train_drafter.self_share
    own_total = sum(map(len, own.values()))
    mixed = {n: s * (1 - share) for n, s in shares.items()} | {n: share * len(t) / own_total for n, t in own.items()}
    data = windows(corpus.tokens | own, mixed, {n: config.self_data.seq_len for n in own})

    held, loops = _heldout_text(config, target, bias, read_corpus(config.data, "heldout").tokens)
    settings = config.train_drafter.train

    @jax.jit
    def accepted_run(params: Any, target: Any, bias: Array, tokens: Array) -> Float[Array, " rows"]:
        first = config.self_data.prompt_len
        count = (tokens.shape[1] - config.drafter.block_size - first) // 4
        anchors = jnp.broadcast_to(first + 4 * jnp.arange(count), (tokens.shape[0], count))
        draft, teacher = block_logits(config, params, target, bias, tokens, anchors, "xla")
        same = (jnp.argmax(draft, -1) == jnp.argmax(teacher, -1)).astype(jnp.float32)
        return jnp.mean(jnp.sum(jnp.cumprod(same, -1), -1), -1) + 1.0

    def evaluate(params: Any, state: Any) -> dict[str, float]:
        """Mean accepted run (bonus included) of the chain on the target's own greedy text, loops excluded."""
        target, bias, _ = state[1]
        save_tree(folder / "drafter.safetensors", _bf16(params))
        runs = {name: np.asarray(accepted_run(params, target, bias, rows)) for name, rows in held.items()}
        return {f"run/{n}": float(run[~loops[n]].mean()) for n, run in runs.items() if not loops[n].all()}

    state = train(
        settings,
        first,
        jnp.zeros(()),
        lambda params, state, key, phase: loss_fn(config, settings.attention, params, state, key, phase),
        folder / "drafter",
        evaluate,
        (target, bias, data),
    )
    save_tree(folder / "drafter.safetensors", _bf16(state.params))


def _bf16(params: Any) -> Any:
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)


def _heldout_text(
    config: NanoConfig, target: Any, bias: Array, heldout: dict[str, np.ndarray], rows: int = 64
) -> tuple[dict[str, Int[Array, "rows seq"]], dict[str, Bool[np.ndarray, " rows"]]]:
    """Greedy text of the target after held-out prompts, by domain, and which rows of it loop."""
    own = config.self_data
    generate = jax.jit(
        lambda target, bias, prompts: self_generate.generate_rows(
            config.target, target, bias, prompts, jnp.zeros(rows), jax.random.key(0), own.seq_len // 2
        )
    )
    held, loops = {}, {}
    for name, ids in heldout.items():
        starts = np.linspace(0, len(ids) - own.prompt_len - 1, rows).astype(int)
        prompts = np.stack([ids[s : s + own.prompt_len] for s in starts]).astype(np.int32)
        held[name] = generate(target, bias, jnp.asarray(prompts))
        loops[name] = looping(np.asarray(held[name]))
    return held, loops
