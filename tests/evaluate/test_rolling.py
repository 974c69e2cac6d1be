"""Bits per byte by rolling windows, against the NumPy model run over each window by itself."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdjax.checkpoint import Target
from kdjax.errors import KdjaxError
from kdjax.evaluate import Scorer, perplexity, pool
from kdjax.evaluate.rolling import windows
from kdjax.reference import model as reference
from tests.model.small import CONFIG, FLOAT32, random_params

START = 60
WHOLE = {"window": 48, "chunk": 16}  # every test uses caches of 64 rows and chunks of 16: one compiled program


def encode(text):
    return [byte - 97 for byte in text.encode()]


TEXT = "".join(chr(97 + t) for t in np.random.default_rng(3).integers(0, 26, 45))


@pytest.fixture(scope="module")
def target():
    return Target(CONFIG, random_params(CONFIG, FLOAT32))


def reference_nats(target, sequence):
    """Negative log-likelihood of each token of `sequence` after its first."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), target.params)
    tokens = np.asarray(sequence)
    out = reference.forward(params, CONFIG, tokens[:-1], np.arange(len(tokens) - 1), reference.empty_cache(CONFIG))
    logits = reference.logits(params, out.hidden)
    log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return -log_p[np.arange(len(tokens) - 1), tokens[1:]]


@given(st.integers(1, 300), st.integers(1, 40), st.data())
def test_windows_score_every_token_once_with_the_longest_context(n_tokens, window, data):
    stride = data.draw(st.integers(1, window))
    all_windows = list(windows(n_tokens, window, stride))
    assert [t for w in all_windows for t in range(w.scored, w.last)] == list(range(n_tokens))
    for w in all_windows:
        assert w.last - w.first == min(window, w.last)
    assert all(w.last - w.scored <= stride for w in all_windows[1:])


def test_one_window_is_the_plain_sum(target):
    score = Scorer(target, FLOAT32, **WHOLE).text(TEXT, encode, START)
    expected = reference_nats(target, [START, *encode(TEXT)])
    assert score.bits == pytest.approx(expected.sum() / math.log(2), rel=1e-5)
    assert (score.bytes, score.tokens) == (45, 45)
    assert score.bits_per_byte == score.bits / 45


@pytest.mark.parametrize("stride", [20, 7])
def test_rolling_windows_forget_what_is_out_of_reach(target, stride):
    sequence = [START, *encode(TEXT)]
    expected = reference_nats(target, sequence[:21]).sum()
    scored = 20
    while scored < len(TEXT):
        last = min(scored + stride, len(TEXT))
        expected += reference_nats(target, sequence[last - 20 : last + 1])[scored - last :].sum()
        scored = last
    score = Scorer(target, FLOAT32, window=20, stride=stride, chunk=16).text(TEXT, encode, START)
    assert score.bits == pytest.approx(expected / math.log(2), rel=1e-5)


def test_context_helps_or_hurts_but_is_seen(target):
    """A longer window must change the sum, or the context would be ignored."""
    short = Scorer(target, FLOAT32, window=16, stride=16, chunk=16).text(TEXT, encode, START)
    full = Scorer(target, FLOAT32, **WHOLE).text(TEXT, encode, START)
    assert abs(short.bits - full.bits) > 1e-2


def test_bytes_are_counted_not_characters_or_tokens(target):
    score = Scorer(target, FLOAT32, **WHOLE).text("\u20ac", lambda text: [1, 2], START)
    assert (score.bytes, score.tokens) == (3, 2)


def test_pool_weights_by_bytes(target):
    scorer = Scorer(target, FLOAT32, **WHOLE)
    parts = [scorer.text(text, encode, START) for text in ("a", TEXT)]
    both = pool(parts)
    assert both.bits_per_byte == pytest.approx((parts[0].bits + parts[1].bits) / 46)


def test_progress_reports_every_token(target):
    seen = []
    Scorer(target, FLOAT32, window=20, stride=7, chunk=16).text(TEXT, encode, START, seen.append)
    assert sum(seen) == 45 and seen[0] == 20 and set(seen[1:-1]) == {7}


def test_bad_input(target):
    with pytest.raises(KdjaxError, match="empty"):
        Scorer(target, FLOAT32).text("", encode, START)
    with pytest.raises(KdjaxError, match="stride=21"):
        Scorer(target, FLOAT32, window=20, stride=21)
    with pytest.raises(KdjaxError, match="window=1000000"):
        Scorer(target, FLOAT32, window=1_000_000)


def test_a_stride_beyond_the_window_is_refused_with_the_config():
    with pytest.raises(KdjaxError, match="stride=32 exceeds window=16"):
        perplexity.Config(window=16, stride=32)
