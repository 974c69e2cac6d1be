"""The plumbing of the training runs: data, schedule, resumable state, export."""

import gzip
import json
import pathlib

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from experiments.nano import draft_network, export, network, optim, restore, train_drafter, trainer
from experiments.nano.config import DataConfig, NanoConfig, OptimizerConfig, Phase, TrainConfig
from experiments.nano.data import domain_shares, read_corpus, windows
from experiments.nano.state import load_dict, load_tree, save_tree
from kdjax.checkpoint import load_drafter, load_target
from kdjax.config.generate import ModelSection
from kdjax.config.strict import load
from kdjax.errors import KdjaxError
from kdjax.evaluate.loops import looping
from kdjax.model.int4 import dequantize
from kdjax.model.runtime import Runtime

ROOT = pathlib.Path(__file__).parents[2]
TOKENIZER = ROOT / "kdjax/bundled/nano/target/tiktoken.model"


@pytest.fixture
def corpus(tmp_path):
    for split in ("train", "heldout"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "py_a.txt").write_text("x = 1\n<|endoftext|>y = 2\n")
        with gzip.open(tmp_path / split / "prose_b.txt.gz", "wt") as file:
            file.write("One day.<|endoftext|>" * 3)
    return DataConfig(corpus=str(tmp_path), tokenizer=str(TOKENIZER), weights={"py_": 3.0, "prose_": 1.0})


def test_documents_end_with_eos_and_the_separator_is_never_encoded(corpus):
    read = read_corpus(corpus, "train")
    assert list(read.tokens["py_a"]).count(3841) == 2 and read.tokens["py_a"][-1] == 3841
    assert list(read.tokens["prose_b"]).count(3841) == 3  # nothing after the last separator
    assert read.bytes["py_a"] == len("x = 1\n") + len("y = 2\n")


def test_an_empty_corpus_is_an_error(tmp_path):
    with pytest.raises(KdjaxError, match="no .txt"):
        read_corpus(DataConfig(corpus=str(tmp_path), tokenizer=str(TOKENIZER), weights={"": 1.0}), "train")


def test_shares_follow_the_longest_prefix_and_sum_to_one():
    config = DataConfig(corpus="", tokenizer="", weights={"py_": 0.6, "py_x": 0.2, "doc_": 0.2, "prose_": 0.0})
    shares = domain_shares(config, {"py_a": 30, "py_b": 10, "py_x": 5, "doc_c": 7, "prose_d": 100})
    assert shares == pytest.approx({"py_a": 0.45, "py_b": 0.15, "py_x": 0.2, "doc_c": 0.2})
    with pytest.raises(KdjaxError, match="match none"):
        domain_shares(config, {"other": 3})


def test_windows_stay_inside_a_domain_and_respect_stride():
    tokens = {"a": np.arange(100, 150, dtype=np.uint16), "b": np.arange(200, 264, dtype=np.uint16)}
    data = windows(tokens, {"a": 0.5, "b": 0.5}, {"b": 16})
    rows = np.asarray(data.sample(jax.random.key(0), 400, 16))
    assert (np.diff(rows, axis=1) == 1).all()
    from_b = rows[rows[:, 0] >= 200]
    assert set((from_b[:, 0] - 200).tolist()) == {0, 16, 32, 48}
    from_a = rows[rows[:, 0] < 200]
    assert from_a.min() == 100 and from_a.max() == 149
    assert 120 < len(from_a) < 280


def test_looping_needs_more_than_four_repeats_of_an_8_gram():
    rng = np.random.default_rng(0)
    free = rng.integers(0, 4096, (1, 128))
    loop = np.tile(rng.integers(0, 4096, 9), 20)[None, :128]
    early = np.concatenate([loop[:, :64], free[:, :64]], axis=1)  # had looped, then went on
    four = free.copy()
    for start in (64, 76, 88, 100):
        four[0, start : start + 8] = np.arange(8)
    assert looping(np.concatenate([free, loop, early, four])).tolist() == [False, True, False, False]


def test_schedule_warms_up_holds_and_decays_to_zero():
    config = OptimizerConfig(warmup=0.1, decay_from=0.5)
    at = [float(optim.schedule(config, jnp.float32(p))) for p in (0.0, 0.05, 0.1, 0.5, 0.75, 1.0)]
    assert at == pytest.approx([0.0, 0.5, 1.0, 1.0, 0.5, 0.0])


def test_state_survives(tmp_path):
    tree = {"layers": {0: {"w": jnp.ones((4, 8), jnp.bfloat16)}, 1: {"w": jnp.zeros((4, 8), jnp.bfloat16)}}}
    save_tree(tmp_path / "x.safetensors", tree)
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
    again = load_dict(tmp_path / "x.safetensors")
    assert again["layers"][0]["w"].dtype == jnp.bfloat16 and (again["layers"][0]["w"] == 1).all()
    assert jax.tree.all(jax.tree.map(np.array_equal, load_tree(tmp_path / "x.safetensors", tree), again))


def fit(folder, steps, seen):
    """Fits y = W x by the trainer; `seen` collects the phases' sequence lengths."""
    target = jax.random.normal(jax.random.key(5), (8, 8))

    def loss_fn(params, state, key, phase):
        seen.add(phase.seq_len)
        x = jax.random.normal(key, (phase.batch, 8))
        error = x @ params["mixer"]["weight"].T - x @ state[1].T
        return jnp.mean(error**2), (state[0] + 1, {})

    config = TrainConfig(
        phases=(Phase(until=0.5, seq_len=1, batch=16), Phase(until=1.0, seq_len=2, batch=16)),
        steps=steps,
        log_every=5,
        evaluate_every_seconds=0.0,
        optimizer=OptimizerConfig(muon_lr=0.1, weight_decay=0.0),
    )
    params = {"mixer": {"weight": jnp.zeros((8, 8))}}
    return trainer.train(config, params, jnp.zeros(()), loss_fn, folder, lambda p, s: {"seen": float(s[0])}, target)


def test_training_learns_runs_every_phase_and_continues(tmp_path):
    seen = set()
    state = fit(tmp_path / "whole", 100, seen)
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records if "loss" in r]
    assert seen == {1, 2} and losses[-1] < 0.3 * losses[0]
    assert int(state.step) == 100 and float(state.extra) == 100 and records[-1]["done"]
    again = fit(tmp_path / "whole", 100, seen)  # finished: nothing left to do
    assert int(again.step) == 100
    assert np.array_equal(again.params["mixer"]["weight"], state.params["mixer"]["weight"])
    longer = fit(tmp_path / "whole", 120, seen)
    assert int(longer.step) == 120 and float(longer.extra) == 120


def test_minutes_or_steps():
    with pytest.raises(KdjaxError, match="exactly one"):
        TrainConfig(phases=(Phase(until=1.0, seq_len=1, batch=1),))
    with pytest.raises(KdjaxError, match="until"):
        TrainConfig(phases=(Phase(until=0.5, seq_len=1, batch=1),), steps=1)


def small_nano():
    config = load(NanoConfig, ROOT / "configs/experiments/nano.toml")
    target = msgspec.structs.replace(
        config.target, hidden_size=64, num_hidden_layers=3, n_routed_experts=4, num_experts_per_tok=2
    )
    drafter = msgspec.structs.replace(
        config.drafter,
        hidden_size=64,
        num_target_layers=3,
        target_layer_ids=(0, 1),
        num_hidden_layers=1,
        layer_types=("full_attention",),
    )
    data = msgspec.structs.replace(config.data, tokenizer=str(TOKENIZER))
    return msgspec.structs.replace(config, target=target, drafter=drafter, data=data)


def exported(folder, random_params):
    """The configuration and router bias of random weights that went through the export."""
    config = small_nano()
    params = random_params(network.init_params, config.target)
    bias = jax.random.normal(jax.random.key(1), network.init_router_bias(config.target).shape)
    save_tree(folder / "target.safetensors", network.freeze(config.target, params, bias))
    drafter = random_params(draft_network.init_params, config.drafter)
    save_tree(folder / "drafter.safetensors", jax.tree.map(lambda w: w.astype(jnp.bfloat16), drafter))
    export.run(config, folder)
    return config, bias


def test_export_keeps_the_codes_of_training(tmp_path, random_params):
    config, bias = exported(tmp_path, random_params)

    runtime = Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16")
    loaded = load_target(tmp_path / "export" / "target", runtime)
    assert loaded.config == config.target
    assert load_drafter(tmp_path / "export" / "drafter", runtime, loaded.config).config == config.drafter
    trained, _ = network.thaw(config.target, load_dict(tmp_path / "target.safetensors"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = dequantize(loaded.params["layers"][1]["mlp"]["experts"][name]["weight"], jnp.dtype(jnp.bfloat16))
        assert np.array_equal(weight, trained["layers"][1]["mlp"]["experts"][name]["weight"])
    stored = loaded.params["layers"][2]["mlp"]["gate"]["e_score_correction_bias"]
    assert np.array_equal(stored, bias[1])


def test_a_restored_target_is_the_one_that_was_exported(tmp_path, random_params):
    config, _ = exported(tmp_path, random_params)

    source = ModelSection(target=str(tmp_path / "export" / "target"))
    config = msgspec.structs.replace(config, evaluate=msgspec.structs.replace(config.evaluate, model=source))
    again = tmp_path / "again"
    again.mkdir()
    restore.run(config, again)
    before, after = (load_dict(folder / "target.safetensors") for folder in (tmp_path, again))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    jax.tree.map(np.testing.assert_array_equal, before, after)

    other = msgspec.structs.replace(config, target=msgspec.structs.replace(config.target, num_experts_per_tok=1))
    with pytest.raises(KdjaxError, match="another shape"):
        restore.run(other, again)


def test_a_drafter_is_trained_on_from_a_checkpoint_of_its_shape(tmp_path, random_params):
    config, _ = exported(tmp_path, random_params)
    exported_to = tmp_path / "export"

    def starting_at(folder, drafter=config.drafter):
        settings = msgspec.structs.replace(config.train_drafter, start=str(folder))
        evaluate = msgspec.structs.replace(config.evaluate, model=ModelSection(target=str(exported_to / "target")))
        return msgspec.structs.replace(config, train_drafter=settings, evaluate=evaluate, drafter=drafter)

    first = train_drafter.first_params(starting_at(exported_to / "drafter"))
    saved = load_dict(tmp_path / "drafter.safetensors")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float32)), first, saved)
    assert {leaf.dtype for leaf in jax.tree.leaves(first)} == {np.dtype(np.float32)}
    with pytest.raises(KdjaxError, match="another shape"):
        wider = msgspec.structs.replace(config.drafter, intermediate_size=320)
        train_drafter.first_params(starting_at(exported_to / "drafter", wider))


def test_the_draft_loss_is_the_cross_entropy_to_the_teacher_at_its_temperature():
    draft, teacher = np.random.default_rng(0).normal(size=(2, 3, 7, 11))
    q = np.exp(draft) / np.exp(draft).sum(-1, keepdims=True)
    for temperature in (1.0, 0.25):
        p = np.exp(teacher / temperature)
        p /= p.sum(-1, keepdims=True)
        weight = np.exp(-np.arange(7) / 6.0)
        expected = -((p * np.log(q)).sum(-1) * weight).sum(-1).mean() / weight.sum()
        found = train_drafter.draft_loss(jnp.asarray(draft), jnp.asarray(teacher), 6.0, temperature)
        assert float(found) == pytest.approx(expected, rel=1e-5)
