"""Three implementations of the shipped weights agree: the one that decodes, the one that trained them, the reference.

A drafter slot that saw another context or another position in training than in decoding would only show as a low
acceptance at some depth, so all slots are compared, at places before and beyond the sliding window.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.nano import draft_network, network
from kdjax import drafter as dflash
from kdjax.decode import DecodeConfig, Decoder, Request
from kdjax.decode.noise import gumbel
from kdjax.evaluate.divergence import Referee
from kdjax.model import k2
from kdjax.model.cache import KVCache
from kdjax.model.runtime import CPU_EXACT
from kdjax.reference import drafter as reference_dflash
from kdjax.reference import model as reference_model
from tests.bundled.conftest import NANO, float32
from tests.tolerances import SHIPPED_LOGITS

STARTS = [1, 2, 40, 128, 255, 257, 312]


@pytest.fixture(scope="module")
def trained(target, drafter, reference_target, reference_drafter):
    """Target and drafter logits in the training form: (tokens) -> target [n, vocab], draft [n, slots, vocab]."""
    params, draft_params = float32(reference_target), float32(reference_drafter)
    layers = range(target.config.first_k_dense_replace, target.config.num_hidden_layers)
    bias = jnp.stack([params["layers"][i]["mlp"]["gate"]["e_score_correction_bias"] for i in layers])
    block_size, mask = drafter.config.block_size, drafter.config.mask_token_id

    @jax.jit
    def forward(params, draft_params, tokens):
        out = network.forward(target.config, params, bias, tokens[None], int4=False, dtype=jnp.float32)
        taps = jnp.concatenate([out.residuals[i] for i in drafter.config.target_layer_ids], -1)
        blocks = jnp.full((len(tokens), block_size), mask).at[:, 0].set(tokens)
        embedded = params["embed_tokens"]["weight"][blocks]
        hidden = draft_network.forward(
            drafter.config, draft_params, taps, jnp.arange(len(tokens))[None], embedded[None]
        )
        return network.logits(params, out.hidden[0]), network.logits(params, hidden[0])

    def run(tokens):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return map(np.asarray, forward(params, draft_params, jnp.asarray(tokens)))

    return run


@pytest.fixture(scope="module")
def decoded(target, drafter, tokens):
    """Taps and logits of one causal pass, and draft logits at `STARTS`, in the form that decodes."""
    n = len(tokens)
    positions = jnp.arange(n, dtype=jnp.int32)[None]
    cache = KVCache.empty(target.config, 1, n, 0, "float32")

    @jax.jit
    def read(params, draft_params, tokens):
        out = k2.forward(
            params,
            target.config,
            tokens,
            positions,
            cache,
            taps=drafter.config.target_layer_ids,
            runtime=CPU_EXACT,
        )
        k, v = dflash.context(draft_params, drafter.config, out.taps, positions, CPU_EXACT)
        empty = dflash.DraftCache.empty(drafter.config, 1, n, "float32")
        context = dflash.append(empty, k, v, jnp.zeros(1, jnp.int32), jnp.full(1, n, jnp.int32))
        return k2.logits(params, target.config, out.hidden, CPU_EXACT)[0], context

    @jax.jit
    def draft(params, draft_params, bonus, start, context):
        block = k2.embed(params, dflash.block_tokens(drafter.config, bonus), CPU_EXACT)
        hidden = dflash.draft(draft_params, drafter.config, block, start, context, CPU_EXACT)
        return k2.logits(params, target.config, hidden, CPU_EXACT)[0]

    logits, context = read(target.params, drafter.params, jnp.asarray(tokens)[None])
    drafts = {
        start: np.asarray(
            draft(
                target.params,
                drafter.params,
                jnp.asarray(tokens[start : start + 1]),
                jnp.full(1, start, jnp.int32),
                context,
            )
        )
        for start in STARTS
    }
    return np.asarray(logits), drafts


@pytest.fixture(scope="module")
def reference(target, drafter, tokens, reference_target, reference_drafter):
    out = reference_model.forward(
        reference_target, target.config, tokens, np.arange(len(tokens)), reference_model.empty_cache(target.config)
    )
    positions = np.arange(len(tokens))
    context = reference_dflash.context(
        reference_drafter, drafter.config, out.taps(drafter.config.target_layer_ids), positions
    )
    drafts = {}
    for start in STARTS:
        block = np.full(drafter.config.block_size, drafter.config.mask_token_id)
        block[0] = tokens[start]
        seen = reference_dflash.Context(context.k[:, :start], context.v[:, :start])
        hidden = reference_dflash.draft(
            reference_drafter, drafter.config, reference_target["embed_tokens"]["weight"][block], start, seen
        )
        drafts[start] = reference_model.logits(reference_target, hidden[1:])
    return reference_model.logits(reference_target, out.hidden), drafts


def test_target_logits(decoded, trained, reference, tokens):
    logits, _ = decoded
    SHIPPED_LOGITS.check(next(iter(trained(tokens))), logits, "training form")
    SHIPPED_LOGITS.check(logits, reference[0], "reference")


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_referee_of_decoding_modes_sees_the_scores_that_choose(decoded, tokens, temperature):
    logits, text, seed = decoded[0][99], tuple(int(t) for t in tokens[:100]), 3
    noise = gumbel(jnp.full(1, seed, jnp.uint32), jnp.full((1, 1), 100, jnp.int32), jnp.arange(4096, dtype=jnp.int32))
    scores = logits / temperature + np.asarray(noise)[0, 0] if temperature else logits
    first, second = (int(t) for t in np.argsort(-scores)[:2])
    gap = Referee(NANO / "target").gap(text, (first, second), temperature, seed)
    SHIPPED_LOGITS.check(gap, scores[first] - scores[second])


@pytest.mark.parametrize("start", STARTS)
def test_draft_logits_of_every_slot(decoded, trained, reference, tokens, start):
    _, by_start = decoded
    _, draft = trained(tokens)
    assert by_start[start].shape[0] == 7
    SHIPPED_LOGITS.check(draft[start], by_start[start], "training form")
    SHIPPED_LOGITS.check(by_start[start], reference[1][start], "reference")


def test_chain_accepts_what_the_training_form_would_draft(target, drafter, trained, tokenizer, tokens):
    """Replays a decoded text with the training form alone: the same rounds, accepted depths and committed context.

    A context row that is missing, stale or shifted after some commit changes later drafts.
    """
    written = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    prompts = [tuple(tokenizer.encode_prompt(written)), tuple(int(t) for t in tokens[:64])]
    limit, extra = 96, drafter.config.block_size
    decoder = Decoder(
        target, drafter, DecodeConfig(mode="chain", budget=7), CPU_EXACT, slots=2, context=64 + limit + extra
    )
    runs = [
        decoder.generate([Request(prompt_ids=p, max_new_tokens=new) for p in prompts]) for new in (limit, limit + extra)
    ]
    depths = np.zeros(7, int)
    for prompt, completion, longer in zip(prompts, *runs, strict=True):
        assert longer.token_ids[:limit] == completion.token_ids
        text = np.asarray(prompt + longer.token_ids, np.int32)
        target_logits, draft_logits = trained(np.pad(text, (0, len(tokens) - len(text))))  # causal: padding is unseen
        greedy, drafts = target_logits.argmax(-1), draft_logits.argmax(-1)
        root, emitted, rounds, accepted = len(prompt), 1, 0, np.zeros(7, int)
        assert text[root] == greedy[root - 1]
        while emitted < limit:
            agrees = drafts[root] == greedy[root : root + 7]
            run = len(list(itertools.takewhile(bool, agrees)))
            rounds += 1
            accepted[:run] += 1
            root, emitted = root + run + 1, emitted + run + 1
        statistics = completion.statistics
        assert (statistics.rounds, statistics.accepted_by_depth) == (rounds, tuple(accepted))
        depths += accepted
    assert depths[-1] > 0, "no block was accepted whole, so the deepest slot was not exercised"
