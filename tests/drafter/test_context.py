"""Cache, masks and positions beyond the golden vectors: many key blocks, ragged slots, far text."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from kdjax import drafter as dflash
from kdjax.config import YarnConfig
from kdjax.model.runtime import Runtime
from kdjax.reference import drafter as reference
from pallas_kernels.draft_attention import KEYS
from tests import tolerances
from tests.checkpoint.random_models import DRAFTER, random_drafter

EXACT = Runtime(compute_dtype="float32", cache_dtype="float32")
BF16 = Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16")
SLIDING = msgspec.structs.replace(DRAFTER, layer_types=("sliding_attention",) * 2, sliding_window=40)
TAPS = len(DRAFTER.target_layer_ids) * DRAFTER.hidden_size

context = jax.jit(dflash.context, static_argnames=("config", "runtime"))
draft = jax.jit(dflash.draft, static_argnames=("config", "runtime"))
append = jax.jit(dflash.append)


def scaled(params):
    """Weights small enough that attention is neither uniform nor one-hot."""
    return jax.tree.map(lambda a: jnp.asarray(a) * 0.2 if a.ndim == 2 else jnp.abs(jnp.asarray(a)), params)


PARAMS = scaled(random_drafter())
WIDE = jax.tree.map(lambda a: np.asarray(a, np.float64), PARAMS)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def filled(config, lengths, capacity=512, runtime=EXACT, params=PARAMS, offset=0):
    """A cache whose slot s holds lengths[s] random context rows, at positions from 0 on (or `offset` on)."""
    slots, n = len(lengths), 512
    taps = draw(slots, n, TAPS)
    positions = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None] + offset, (slots, n))
    k, v = context(params, config, jnp.asarray(taps), positions, runtime)
    cache = dflash.DraftCache.empty(config, slots, capacity, runtime.cache_dtype)
    start = jnp.full(slots, offset, jnp.int32)
    return taps, append(cache, k, v, start, jnp.array(lengths, jnp.int32))


def run(config, embeddings, lengths, cache, runtime=EXACT):
    return np.asarray(draft(PARAMS, config, jnp.asarray(embeddings), jnp.array(lengths, jnp.int32), cache, runtime))


def block(slots, seed=1):
    return draw(slots, DRAFTER.block_size, DRAFTER.hidden_size, seed=seed)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"sliding_window": 150},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 3},
        {"is_causal": True},
        {"is_causal": False},
        {"rope_scaling": None},
        {"rope_scaling": YarnConfig(factor=64.0, original_max_position_embeddings=64, attention_factor=1.41589)},
    ],
)
def test_ragged_slots_equal_the_reference_one_by_one(change):
    config = msgspec.structs.replace(DRAFTER, **change)
    lengths = [300, 1, 2, KEYS, 131]
    taps, cache = filled(config, lengths)
    embeddings = block(len(lengths))
    ours = run(config, embeddings, lengths, cache)

    for s, n in enumerate(lengths):
        rows = reference.context(WIDE, config, taps[s, :n], np.arange(n))
        expected = reference.draft(WIDE, config, embeddings[s], n, rows)[1:]
        tolerances.DRAFTER.check(ours[s], expected, f"slot {s}")


def test_amplitude_knob_changes_the_draft():
    loud = YarnConfig(factor=64.0, original_max_position_embeddings=64, attention_factor=1.41589)
    drafts = []
    for config in (DRAFTER, msgspec.structs.replace(DRAFTER, rope_scaling=loud)):
        _, cache = filled(config, [50])
        drafts.append(run(config, block(1), [50], cache))
    assert np.abs(drafts[0] - drafts[1]).max() > 0.05


def test_block_is_the_bonus_token_then_masks():
    tokens = dflash.block_tokens(DRAFTER, jnp.array([5, 0], jnp.int32))
    np.testing.assert_array_equal(tokens, [[5, 59, 59, 59], [0, 59, 59, 59]])


def test_the_bonus_token_changes_every_drafted_slot():
    _, cache = filled(DRAFTER, [20])
    first = block(1)
    second = first.copy()
    second[:, 0] = draw(DRAFTER.hidden_size, seed=9)
    change = np.abs(run(DRAFTER, first, [20], cache) - run(DRAFTER, second, [20], cache)).max(axis=-1)
    assert (change > 0.01).all()


def test_causal_layers_hide_later_slots_of_the_block():
    config = msgspec.structs.replace(DRAFTER, is_causal=True)
    _, cache = filled(config, [20])
    first = block(1)
    second = first.copy()
    second[:, 2] += 1.0
    one, two = run(config, first, [20], cache), run(config, second, [20], cache)
    np.testing.assert_array_equal(one[:, 0], two[:, 0])
    assert np.abs(one[:, 1:] - two[:, 1:]).min(axis=-1).max() > 0


def test_drafts_do_not_depend_on_capacity_or_neighbours_bit_for_bit():
    """Tree budget and number of other requests only change capacity and neighbours; block and drafts stay the same."""
    embeddings = block(3)
    lengths = [37, 200, 5]
    _, small = filled(DRAFTER, lengths, capacity=256)
    _, large = filled(DRAFTER, lengths, capacity=700)
    expected = run(DRAFTER, embeddings, lengths, small)
    np.testing.assert_array_equal(run(DRAFTER, embeddings, lengths, large), expected)
    longer = [37, 400, 5]
    _, other = filled(DRAFTER, [37, 200, 5], capacity=700)
    crowded = run(DRAFTER, embeddings, longer, other)
    np.testing.assert_array_equal(crowded[[0, 2]], expected[[0, 2]])
    assert (crowded[1] != expected[1]).any()


def test_stale_rows_are_never_seen():
    lengths = [37, 130]
    _, cache = filled(DRAFTER, lengths)
    poisoned = jax.tree.map(lambda rows: rows.at[0, 37:].set(1e4).at[1, 130:].set(1e4), cache)
    np.testing.assert_array_equal(run(DRAFTER, block(2), lengths, poisoned), run(DRAFTER, block(2), lengths, cache))


def test_key_blocks_beyond_the_live_length_are_not_read():
    """NaN would come through a masked product, so finite drafts show that the loop stopped in time."""
    _, cache = filled(DRAFTER, [KEYS + 1])
    unread = jax.tree.map(lambda rows: rows.at[:, 2 * KEYS :].set(jnp.nan), cache)
    assert np.isfinite(run(DRAFTER, block(1), [KEYS + 1], unread)).all()
    read = jax.tree.map(lambda rows: rows.at[:, 2 * KEYS - 1 :].set(jnp.nan), cache)
    assert np.isnan(run(DRAFTER, block(1), [KEYS + 1], read)).any()


def test_key_blocks_before_every_window_are_not_read():
    lengths = [3 * KEYS + 60, 3 * KEYS + 50]
    _, cache = filled(SLIDING, lengths)
    unread = jax.tree.map(lambda rows: rows.at[:, : 3 * KEYS].set(jnp.nan), cache)
    np.testing.assert_array_equal(run(SLIDING, block(2), lengths, unread), run(SLIDING, block(2), lengths, cache))


def test_context_computed_in_padded_pieces_is_the_same():
    taps = np.pad(draw(1, 30, TAPS), [(0, 0), (0, 17), (0, 0)])
    whole = context(PARAMS, DRAFTER, jnp.asarray(taps), jnp.arange(47, dtype=jnp.int32)[None], EXACT)
    cache = dflash.DraftCache.empty(DRAFTER, 1, 64, "float32")
    for first, n in ((0, 17), (17, 1), (18, 4), (22, 8)):
        positions = jnp.arange(first, first + 17, dtype=jnp.int32)[None]
        k, v = context(PARAMS, DRAFTER, jnp.asarray(taps[:, first : first + 17]), positions, EXACT)
        cache = append(cache, k, v, jnp.array([first], jnp.int32), jnp.array([n], jnp.int32))
    for layer in range(2):
        tolerances.DRAFTER.check(cache.k[layer][:, :30], whole[0][layer][:, :30])
        tolerances.DRAFTER.check(cache.v[layer][:, :30], whole[1][layer][:, :30])


def test_append_drops_padding_and_overflow_and_never_shifts():
    cache = dflash.DraftCache.empty(DRAFTER, 3, KEYS, "float32")
    k = jnp.asarray(draw(2, 3, 8, 2, 8)) + 10
    after = append(cache, k, -k, jnp.array([KEYS - 1, KEYS, 4], jnp.int32), jnp.array([8, 8, 3], jnp.int32))
    for layer in range(2):
        expected = np.zeros((3, KEYS, 2, 8), np.float32)
        expected[0, KEYS - 1] = k[layer, 0, 0]
        expected[2, 4:7] = k[layer, 2, :3]
        np.testing.assert_array_equal(after.k[layer], expected)
        np.testing.assert_array_equal(after.v[layer], -expected)


def test_append_under_jit_may_take_over_its_buffers():
    cache = dflash.DraftCache.empty(DRAFTER, 1, KEYS, "float32")
    k = jnp.asarray(draw(2, 1, 2, 2, 8))
    step = jax.jit(dflash.append, donate_argnums=0)
    after = step(cache, k, k, jnp.array([3], jnp.int32), jnp.array([2], jnp.int32))
    np.testing.assert_array_equal(after.v[1][:, 3:5], k[1])


@pytest.mark.parametrize("position", [5_000, 20_000])
def test_context_keys_far_out_are_rotated_by_their_absolute_position(position):
    taps = draw(1, 4, TAPS)
    positions = np.arange(position, position + 4, dtype=np.int32)
    k, v = context(PARAMS, DRAFTER, jnp.asarray(taps), jnp.asarray(positions)[None], EXACT)
    rows = reference.context(WIDE, DRAFTER, taps[0], positions)
    tolerances.DRAFTER.check(k[:, 0], rows.k)
    tolerances.DRAFTER.check(v[:, 0], rows.v)


@pytest.mark.parametrize("offset", [5_000, 20_000])
def test_a_sliding_drafter_does_not_care_how_far_out_it_is(offset):
    """Rotary angles are relative: the same last `window` tokens give the same drafts at any distance."""
    near, far = 45, offset + 45
    _, cache = filled(SLIDING, [near], capacity=64)
    _, far_cache = filled(SLIDING, [near], capacity=far, offset=offset)
    ours, expected = (run(SLIDING, block(1), [n], c) for n, c in ((far, far_cache), (near, cache)))
    # float32 angles at position 20,000 are exact to 1e-3 rad
    np.testing.assert_allclose(ours, expected, atol=5e-3)
    head = draw(DRAFTER.hidden_size, 64, seed=3)
    np.testing.assert_array_equal((ours @ head).argmax(-1), (expected @ head).argmax(-1))


def test_bfloat16_mode_stays_close_to_float32():
    lengths = [150, 20]
    _, exact_cache = filled(DRAFTER, lengths)
    exact = run(DRAFTER, block(2), lengths, exact_cache)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), PARAMS)
    _, cache = filled(DRAFTER, lengths, runtime=BF16, params=params)
    assert cache.k[0].dtype == jnp.bfloat16
    rough = draft(params, DRAFTER, jnp.asarray(block(2)), jnp.array(lengths, jnp.int32), cache, BF16)
    assert rough.dtype == jnp.bfloat16
    rough = np.asarray(rough).astype(np.float32)
    # 8 bits of mantissa through two layers
    assert np.linalg.norm(rough - exact) < 0.05 * np.linalg.norm(exact)
