import msgspec
import numpy as np
import pytest

from kdjax.reference import drafter as dflash
from tests import oracles, tolerances


@pytest.mark.parametrize("name", oracles.DFLASH)
def test_drafter_matches_its_golden_steps(oracle, drafter, name):
    case = oracle(name)
    config, params = drafter(name)
    lm_head = case.inputs["lm_head.weight"].astype(np.float64)
    embed = case.inputs["embed_tokens.weight"].astype(np.float32)
    context = dflash.empty_context(config)
    for step in oracles.draft_steps(case):
        new = np.arange(step.start - len(step.target_hidden), step.start)
        tolerances.DRAFTER.check(dflash.features(params, config, step.target_hidden), step.expected["ctx"])
        context = context.extended(dflash.context(params, config, step.target_hidden, new))
        np.testing.assert_array_equal(step.block_ids[1:], config.mask_token_id)
        np.testing.assert_array_equal(embed[step.block_ids], step.embedding)
        hidden = dflash.draft(params, config, step.embedding, step.start, context)
        tolerances.DRAFTER.check(hidden, step.expected["hidden"])
        tolerances.DRAFTER.check(hidden[1:] @ lm_head.T, step.expected["logits"])
        if "visibility" in step.expected:
            ours = np.stack([dflash.visible(config, i, step.start) for i in range(config.num_hidden_layers)])
            np.testing.assert_array_equal(ours, step.expected["visibility"])
    for kind, rows in (("k", context.k), ("v", context.v)):
        for layer in (0, config.num_hidden_layers - 1):
            tolerances.DRAFTER.check(rows[layer], step.expected[f"ctx_{kind}.{layer}"])


def test_a_window_narrower_than_the_block_limits_the_context_only(drafter):
    config, _ = drafter("dflash_swa_short_context")
    narrow = msgspec.structs.replace(config, sliding_window=3, is_causal=False)
    sliding = config.layer_types.index("sliding_attention")
    sees = dflash.visible(narrow, sliding, 10)
    assert sees[:, 10:].all()
    assert [np.flatnonzero(row[:10]).tolist() for row in sees[:3]] == [[8, 9], [9], []]


def test_the_bonus_token_changes_every_draft(oracle, drafter):
    """A block filled with MASK in slot 0 too would not notice the token that was just committed."""
    case = oracle("dflash_swa_short_context")
    config, params = drafter("dflash_swa_short_context")
    step = oracles.draft_steps(case)[0]
    context = dflash.context(params, config, step.target_hidden, np.arange(step.start))
    other = step.embedding.copy()
    other[0] = case.inputs["embed_tokens.weight"][(step.block_ids[0] + 1) % config.vocab_size].astype(np.float32)
    one, two = (dflash.draft(params, config, e, step.start, context) for e in (step.embedding, other))
    assert (np.abs(one - two).max(-1)[1:] > 1e-3).all()
