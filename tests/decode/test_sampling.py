"""Counter-based noise and sampling: published vectors, the NumPy reference, exact distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdjax import tree as ddtree
from kdjax.config import Sampling
from kdjax.decode.noise import gumbel, philox4x32_10
from kdjax.decode.sampling import kept, sample
from kdjax.errors import KdjaxError
from kdjax.reference import sampling as reference

# Random123 known-answer vectors (kat_vectors, philox4x32 10): counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter, key, expected):
    counter, key = (tuple(jnp.uint32(int(w, 16)) for w in words.split()) for words in (counter, key))
    assert " ".join(f"{int(w):08x}" for w in philox4x32_10(counter, key)) == expected


def test_noise_equals_the_reference_and_needs_only_its_own_counter():
    seeds = np.array([0, 7, 2**32 - 1], np.uint32)
    positions = np.array([[0, 1], [4095, 3], [262143, 12]], np.int32)
    ids = np.array([0, 1, 2, 4095, 163839], np.int32)
    noise = np.asarray(gumbel(jnp.asarray(seeds), jnp.asarray(positions), jnp.asarray(ids)))
    for s in range(3):
        for r in range(2):
            expected = reference.gumbel(int(seeds[s]), int(positions[s, r]), ids)
            np.testing.assert_allclose(noise[s, r], expected, rtol=1e-5, atol=1e-5)
    shard = np.asarray(gumbel(jnp.asarray(seeds), jnp.asarray(positions), jnp.asarray(ids[3:])))
    np.testing.assert_array_equal(shard, noise[:, :, 3:])


def test_noise_is_finite_at_both_ends_of_the_uniform():
    """Words whose upper bits are all ones or all zeros: infinite noise would win over any logits, also -inf ones."""
    for position, token in ((287, 28324), (19, 128866)):
        counter = jnp.array([0], jnp.uint32), jnp.array([[position]], jnp.int32), jnp.array([token], jnp.int32)
        noise = np.asarray(gumbel(*counter))
        assert np.isfinite(noise).all()
        np.testing.assert_allclose(noise[0, 0], reference.gumbel(0, position, np.array([token])), rtol=1e-5)
    logits = jnp.full((1, 1, 30000), -50.0).at[0, 0, 3].set(0.0)
    draw = sample(logits, jnp.array([[287]], jnp.int32), jnp.array([0], jnp.uint32), Sampling(temperature=1.0))
    assert draw.tolist() == [[3]]


@pytest.mark.parametrize(
    "config",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=0.7),
        Sampling(temperature=1.5, top_k=5),
        Sampling(temperature=1.0, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
    ],
    ids=lambda c: f"T{c.temperature}-k{c.top_k}-p{c.top_p}-m{c.min_p}",
)
def test_sample_equals_the_reference(config):
    rng = np.random.default_rng(4)
    logits = (rng.normal(size=(3, 40, 50)) * 2).astype(np.float32)
    positions = np.arange(120, dtype=np.int32).reshape(3, 40)
    seeds = np.array([1, 2, 3], np.uint32)
    draw = jax.jit(sample, static_argnums=3)
    got = np.asarray(draw(jnp.asarray(logits), jnp.asarray(positions), jnp.asarray(seeds), config))
    same = reference.Sampling(
        temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, min_p=config.min_p
    )
    expected = [
        [reference.sample(logits[s, r], same, int(seeds[s]), int(positions[s, r])) for r in range(40)] for s in range(3)
    ]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Sampling(temperature=1.0, top_k=2), [1, 3]),  # three tokens tie for the second place: the lowest id stays
        (Sampling(temperature=1.0, top_p=0.45), [1, 3]),
        (Sampling(temperature=1.0, top_p=0.39), [1]),  # the first token alone reaches it
        (Sampling(temperature=1.0, min_p=0.5), [1, 3, 4, 5]),
        (Sampling(temperature=1.0, top_k=100), [0, 1, 2, 3, 4, 5]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.999, min_p=0.1), [1, 3, 4]),
    ],
)
def test_filters_cut_ties_by_token_id(config, expected):
    p = np.array([0.0002, 0.4, 0.0001, 0.2, 0.2, 0.2])
    keep = kept(jnp.asarray(np.log(p)[None], jnp.float32), config)
    assert np.flatnonzero(np.asarray(keep)[0]).tolist() == expected
    with np.errstate(divide="ignore"):
        same = reference.Sampling(temperature=1.0, top_k=config.top_k, top_p=config.top_p, min_p=config.min_p)
        assert np.flatnonzero(reference.kept(np.log(p), same)).tolist() == expected


@pytest.mark.parametrize("config", [Sampling(temperature=1.0, top_k=5), Sampling(temperature=1.0, top_p=0.9)])
def test_backends_keep_the_same_tokens(config):
    """Integer logits tie at the cut, and 300 tokens are more than the first look of `top_p`."""
    logits = jnp.asarray(np.random.default_rng(3).integers(-1, 2, (2, 4, 300)), jnp.float32)
    keep = jax.jit(kept, static_argnames=("sampling", "backend"))
    expected, got = (keep(logits, sampling=config, backend=backend) for backend in ("xla", "interpret"))
    assert 5 <= expected.sum(-1).min() and expected.sum(-1).max() < 300
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_top_p_beyond_the_head_of_a_flat_distribution(spread):
    """A flat row needs nearly every token, which the first look at the most likely ones cannot see."""
    logits = (np.random.default_rng(6).normal(size=(4, 1000)) * spread).astype(np.float32)
    config = Sampling(temperature=1.0, top_p=0.9)
    keep = np.asarray(jax.jit(kept, static_argnums=1)(jnp.asarray(logits), config))
    expected = [reference.kept(row, reference.Sampling(temperature=1.0, top_p=0.9)).sum() for row in logits]
    np.testing.assert_allclose(keep.sum(-1), expected, atol=1)  # one token at the cut may round either way
    assert (min(expected) > 800) == (spread < 1)


def test_top_k_keeps_its_tail_where_the_mass_rounds_to_one():
    logits = np.full((1, 300), -40.0, np.float32)
    logits[0, 0] = 0.0
    for k in (50, 200):
        keep = kept(jnp.asarray(logits), Sampling(temperature=1.0, top_k=k))
        assert np.flatnonzero(np.asarray(keep)[0]).tolist() == list(range(k))


def test_greedy_takes_the_lowest_id_and_ignores_the_seed():
    logits = jnp.array([[[1.0, 3.0, 3.0, 0.0]]], jnp.float32)
    for seed in (0, 9):
        got = sample(logits, jnp.array([[5]], jnp.int32), jnp.array([seed], jnp.uint32), Sampling())
        assert got.tolist() == [[1]]


def test_same_seed_same_draws_and_temperature_matters():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 64, 100)).astype(np.float32))
    positions = jnp.arange(64, dtype=jnp.int32)[None]

    def draws(seed: int, temperature: float) -> list[int]:
        config = Sampling(temperature=temperature)
        return sample(logits, positions, jnp.array([seed], jnp.uint32), config)[0].tolist()

    assert draws(3, 1.0) == draws(3, 1.0)
    assert draws(3, 1.0) != draws(4, 1.0)
    assert draws(3, 1.0) != draws(3, 0.3)


def test_unused_noise_and_filters_are_not_compiled():
    shapes = (
        jax.ShapeDtypeStruct((1, 2, 64), jnp.float32),
        jax.ShapeDtypeStruct((1, 2), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.uint32),
    )

    def program(config: Sampling) -> str:
        return jax.jit(sample, static_argnums=3).lower(*shapes, config).as_text()

    greedy, plain = program(Sampling()), program(Sampling(temperature=1.0))
    assert "stablehlo.xor" not in greedy and "stablehlo.log" not in greedy
    assert "stablehlo.xor" in plain and "top_k" not in plain
    assert "top_k" in program(Sampling(temperature=1.0, top_k=4))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_first_two_tokens_of_a_tree_round_follow_the_exact_distribution(temperature):
    """Chi-square of 20,000 pairs over 25 cells: the drafter shapes the tree, never the distribution."""
    n, vocab = 20_000, 5
    rng = np.random.default_rng(8)
    target = rng.normal(size=(vocab + 1, vocab)).astype(np.float32)  # row: previous token, the last row is the start
    drafts = jnp.asarray(rng.normal(size=(n, 2, vocab)).astype(np.float32))
    seeds = jnp.arange(n, dtype=jnp.uint32)
    config = Sampling(temperature=temperature)

    @jax.jit
    def pairs(table, drafts, seeds):
        tree = ddtree.build(drafts, jnp.full((n,), vocab, jnp.int32), 4)
        posterior = sample(table[tree.tokens], tree.positions(jnp.full((n,), 7, jnp.int32)) + 1, seeds, config)
        accepted = ddtree.accept(tree, posterior, 2)
        first = posterior[:, 0]
        # Where the first draw left the tree, the next round would draw the second token after it.
        later = sample(table[first][:, None], jnp.full((n, 1), 9, jnp.int32), seeds, config)[:, 0]
        row = accepted.rows[:, 1]
        inside = jnp.take_along_axis(posterior, row[:, None], 1)[:, 0]
        return first, jnp.where(accepted.n_accepted > 1, inside, later), accepted.n_accepted

    first, second, n_accepted = (np.asarray(x) for x in pairs(jnp.asarray(target), drafts, seeds))
    assert 0.2 < np.mean(n_accepted > 1) < 0.9  # both ways of getting the second token occur
    p = np.exp(target / temperature)
    p /= p.sum(-1, keepdims=True)
    expected = n * p[vocab][:, None] * p[:vocab]
    observed = np.zeros((vocab, vocab))
    np.add.at(observed, (first, second), 1)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 51.2  # 24 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": 1e-40},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 1.5},
    ],
)
def test_impossible_sampling_is_refused(bad):
    name = next(iter(bad))
    with pytest.raises(KdjaxError, match=f"{name}="):
        Sampling(**bad)
