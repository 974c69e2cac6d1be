"""Stage 1: the target model, the last phase with INT4 quantisation-aware experts."""

from __future__ import annotations

import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from experiments.nano import network
from experiments.nano.config import Attention, NanoConfig, Phase
from experiments.nano.data import Corpus, Windows, domain_shares, read_corpus, windows
from experiments.nano.state import save_tree
from experiments.nano.trainer import train
from kdjax.config.model import ModelConfig

BIAS_STEP = 1e-3


def loss_fn(
    config: ModelConfig, attention: Attention, params: Any, state: Any, key: Array, phase: Phase
) -> tuple[Float[Array, ""], tuple[Any, dict[str, Array]]]:
    """Mean next-token cross entropy in nats; the router bias moves against the load (DeepSeek-V3, section 2.1.2)."""
    bias, data = state
    tokens = data.sample(key, phase.batch, phase.seq_len + 1)
    out = network.forward(config, params, bias, tokens[:, :-1], int4=phase.int4, attention_implementation=attention)
    nll = optax.softmax_cross_entropy_with_integer_labels(network.logits(params, out.hidden), tokens[:, 1:])
    mean_load = config.num_experts_per_tok / config.n_routed_experts
    bias = bias + BIAS_STEP * jnp.sign(mean_load - out.load)
    return jnp.mean(nll), (bias, {"max_load": jnp.max(out.load) / mean_load})


@functools.partial(jax.jit, static_argnums=(0, 1))
def window_nll(
    config: ModelConfig, attention: Attention, params: Any, bias: Array, tokens: Int[Array, "windows seq"]
) -> Float[Array, " windows"]:
    """Cross entropy of each window in nats, with INT4 experts. Compiled once for all evaluations of a run."""
    out = network.forward(config, params, bias, tokens[:, :-1], int4=True, attention_implementation=attention)
    nll = optax.softmax_cross_entropy_with_integer_labels(network.logits(params, out.hidden), tokens[:, 1:])
    return jnp.sum(nll, -1)


def heldout_bits_per_byte(
    config: ModelConfig, params: Any, bias: Array, heldout: Corpus, *, seq_len: int, attention: Attention
) -> dict[str, float]:
    """Bits per byte of each domain over disjoint windows: a quick curve, not the reported figure."""
    result = {}
    for name, ids in heldout.tokens.items():
        count = max((len(ids) - 1) // seq_len, 1)
        if len(ids) < seq_len + 1:
            continue
        rows = np.stack([ids[i * seq_len : i * seq_len + seq_len + 1] for i in range(count)]).astype(np.int32)
        batch = 64
        padded = np.pad(rows, ((0, -len(rows) % batch), (0, 0)))
        total = sum(
            float(jnp.sum(window_nll(config, attention, params, bias, padded[i : i + batch])[: max(len(rows) - i, 0)]))
            for i in range(0, len(padded), batch)
        )
        share = count * seq_len / len(ids)
        result[f"bpb/{name}"] = total / math.log(2) / (heldout.bytes[name] * share)
    return result


def run(config: NanoConfig, folder: pathlib.Path) -> None:
    """Trains and writes `target.safetensors` (frozen weights) under `folder`."""
    train_corpus, heldout = read_corpus(config.data, "train"), read_corpus(config.data, "heldout")
    data: Windows = windows(train_corpus.tokens, domain_shares(config.data, train_corpus.bytes))
    attention = config.train_target.attention
    state = train(
        config.train_target,
        network.init_params(config.target, jax.random.key(config.train_target.seed)),
        network.init_router_bias(config.target),
        lambda params, state, key, phase: loss_fn(config.target, attention, params, state, key, phase),
        folder / "target",
        lambda params, state: heldout_bits_per_byte(
            config.target,
            params,
            state[0],
            heldout,
            seq_len=config.train_target.phases[-1].seq_len,
            attention=attention,
        ),
        data,
    )
    save_tree(folder / "target.safetensors", network.freeze(config.target, state.params, state.extra))
