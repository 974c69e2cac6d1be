import numpy as np
import pytest

from kdjax.errors import KdjaxError
from kdjax.reference import sampling
from kdjax.reference.sampling import Sampling

# Random123 1.14, tests/kat_vectors: counter words, key words, output words
PHILOX4X32_10 = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "output"), PHILOX4X32_10)
def test_philox_known_answers(counter, key, output):
    words = [np.uint32(int(word, 16)) for word in (counter + " " + key).split()]
    got = sampling.philox4x32_10(tuple(np.array([w]) for w in words[:4]), tuple(words[4:]))
    assert [f"{int(word[0]):08x}" for word in got] == output.split()


def test_uniforms_are_open_and_exact_in_float32():
    u = sampling.uniform(7, 123, np.arange(100_000))
    assert u.min() > 0 and u.max() < 1
    assert ((u - 2.0**-24) * 2**23 % 1 == 0).all()
    assert (u == u.astype(np.float32)).all()
    assert np.float32(sampling.uniform(0, 287, np.array([28324]))) < 1  # a word whose upper 24 bits are all ones
    counts = np.histogram(u, 50, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 100  # chi-square, 49 degrees of freedom: 1 in 10^5


def test_a_uniform_is_the_philox_word_of_token_and_position():
    counter = tuple(np.array([w], np.uint32) for w in (163_000, 262_143, 0, 0))
    word = int(sampling.philox4x32_10(counter, (np.uint32(4_000_000_000), np.uint32(0x6B646A78)))[0][0])
    u = sampling.uniform(4_000_000_000, 262_143, np.array([163_000]))
    assert u.tolist() == [((word >> 9) + 0.5) * 2.0**-23]


def test_noise_depends_on_seed_position_and_token_only():
    ids = np.arange(64)
    noise = sampling.gumbel(3, 10, ids)
    np.testing.assert_array_equal(sampling.gumbel(3, 10, ids[40:]), noise[40:])
    assert not (sampling.gumbel(4, 10, ids) == noise).any()
    assert not (sampling.gumbel(3, 11, ids) == noise).any()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_samples_follow_the_softmax(temperature):
    logits = np.array([1.0, 0.0, -1.0, 2.0, 0.5])
    p = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    draws = 4000
    tokens = [sampling.sample(logits, Sampling(temperature=temperature), seed, 17) for seed in range(draws)]
    observed = np.bincount(tokens, minlength=5)
    assert ((observed - draws * p) ** 2 / (draws * p)).sum() < 25  # 4 degrees of freedom: 1 in 10^4


def kept_ids(logits, **filters):
    return np.flatnonzero(sampling.kept(np.asarray(logits), Sampling(temperature=1.0, **filters))).tolist()


def test_filters_keep_what_they_say():
    p = np.log([0.1, 0.4, 0.2, 0.2, 0.1])
    assert kept_ids(p) == [0, 1, 2, 3, 4]
    assert kept_ids(p, top_k=2) == [1, 2]  # ids 2 and 3 tie: the lower one stays
    assert kept_ids(p, top_p=0.5) == [1, 2]
    assert kept_ids(p, top_p=0.39) == [1]
    assert kept_ids(p, top_p=1e-9) == [1]
    assert kept_ids(p, min_p=0.4) == [1, 2, 3]
    assert kept_ids(p, min_p=1.0) == [1]
    assert kept_ids(p, top_k=4, top_p=0.7, min_p=0.1) == [1, 2, 3]


def test_nan_logits_are_refused():
    for temperature in (0.0, 1.0):
        with pytest.raises(KdjaxError, match="position 12 contain NaN"):
            sampling.sample(np.array([0.0, np.nan]), Sampling(temperature=temperature), 1, 12)


def test_greedy_takes_the_lowest_id_of_a_tie():
    assert sampling.sample(np.array([0.0, 3.0, 3.0]), Sampling(), 1, 1) == 1


def test_top_k_one_is_greedy_at_any_temperature():
    logits = np.random.default_rng(0).standard_normal(30)
    tokens = {sampling.sample(logits, Sampling(temperature=2.0, top_k=1), seed, 5) for seed in range(20)}
    assert tokens == {int(logits.argmax())}
