"""Tree, chain and autoregressive decoding emit the same tokens, whatever the drafter, budget, stop, limit and batch."""

import jax
import numpy as np
import pytest

from kdjax.checkpoint import Target
from kdjax.decode import DecodeConfig, Decoder, Request
from kdjax.model import k2
from kdjax.reference import loop as reference
from kdjax.reference.sampling import Sampling
from tests.decode.models import (
    BLOCK,
    MASK,
    MODEL,
    RUNTIME,
    Switched,
    drafter,
    perfect_table,
    stored_params,
    target,
    text_of,
)

CASES = 100  # per temperature
POSITIONS = 64
BUDGETS = (0, 1, 4, 8, 16, 32)


class Bench:
    """One program per mode; everything else of a case is data."""

    def __init__(self, temperature: float):
        model, own = target(), drafter()
        drafting = Switched(own.config, model.config, RUNTIME)
        self.decoders = {
            mode: Decoder(
                model,
                own,
                DecodeConfig(mode=mode, budget=32, temperature=temperature, top_p=0.95, prefill_chunk=16),
                RUNTIME,
                slots=slots,
                context=POSITIONS,
                drafting=drafting,
            )
            for mode, slots in (("autoregressive", 1), ("chain", 2), ("tree", 3))
        }
        self.use_table(np.zeros((CASES, POSITIONS, BLOCK - 1, MODEL.vocab_size), np.float32), scripted=False)
        self.requests = random_requests(int(temperature * 10))
        self.truth = self.decoders["autoregressive"].generate(self.requests)

    def use_table(self, table: np.ndarray, scripted: bool = True) -> None:
        own = {"dflash": drafter().params, "table": table, "scripted": np.bool_(scripted)}
        for mode in ("chain", "tree"):
            self.decoders[mode].params = self.decoders[mode].params._replace(drafter=own)

    def use_perfect_drafter(self) -> None:
        texts = [text_of(r, c) for r, c in zip(self.unlimited, self.full, strict=True)]
        self.use_table(perfect_table(texts, POSITIONS))

    @property
    def unlimited(self) -> list[Request]:
        """The same prompts without stops, as long as the context allows."""
        return [replace(r, max_new_tokens=POSITIONS - len(r.prompt_ids), stop_token_ids=()) for r in self.requests]

    @property
    def full(self):
        if not hasattr(self, "_full"):
            self._full = self.decoders["autoregressive"].generate(self.unlimited)
        return self._full


def replace(request: Request, **changes) -> Request:
    return Request(**({f: getattr(request, f) for f in Request.__struct_fields__} | changes))


def random_requests(seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(CASES):
        prompt = rng.integers(0, MODEL.vocab_size, rng.integers(1, 40))
        limit = int(rng.choice([1, 2, 7, 8, 9, 20, POSITIONS - len(prompt)]))
        stops = rng.integers(0, MODEL.vocab_size, rng.choice([0, 0, 1, 4]))
        requests.append(
            Request(
                prompt_ids=tuple(prompt.tolist()),
                max_new_tokens=limit,
                seed=index,
                stop_token_ids=tuple(stops.tolist()),
                budget=int(rng.choice(BUDGETS)),
            )
        )
    return requests


@pytest.fixture(scope="module", params=[0.0, 0.9], ids=["greedy", "sampled"])
def bench(request) -> Bench:
    return Bench(request.param)


def assert_same(bench: Bench, mode: str):
    got = bench.decoders[mode].generate(bench.requests)
    for request, truth, completion in zip(bench.requests, bench.truth, got, strict=True):
        assert completion.token_ids == truth.token_ids, request
        assert completion.finish_reason == truth.finish_reason, request
    return got


def test_cases_exercise_stops_and_limits(bench):
    reasons = [c.finish_reason for c in bench.truth]
    assert min(reasons.count("stop"), reasons.count("length")) > 10
    for request, completion in zip(bench.requests, bench.truth, strict=True):
        body, last = completion.token_ids[:-1], completion.token_ids[-1]
        assert not set(body) & set(request.stop_token_ids)
        if completion.finish_reason == "stop":
            assert last in request.stop_token_ids
        else:
            assert len(completion.token_ids) == request.max_new_tokens


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_random_drafter(bench, mode):
    bench.use_table(np.zeros((CASES, POSITIONS, BLOCK - 1, MODEL.vocab_size), np.float32), scripted=False)
    assert_same(bench, mode)


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_perfect_drafter_accepts_whole_blocks(bench, mode):
    bench.use_perfect_drafter()
    got = assert_same(bench, mode)
    for request, completion in zip(bench.requests, got, strict=True):
        rounds, depth = completion.statistics.rounds, min(BLOCK - 1, request.budget)
        assert rounds == -(-(len(completion.token_ids) - 1) // (depth + 1))


def test_adversarial_drafter_and_broken_rows(bench):
    """Confident nonsense, with some rows NaN or all -inf."""
    rng = np.random.default_rng(3)
    table = rng.normal(size=(CASES, POSITIONS, BLOCK - 1, MODEL.vocab_size)).astype(np.float32) * 30
    table[:, 5::7, 2] = np.nan
    table[:, 3::7, 0] = -np.inf
    bench.use_table(table)
    assert_same(bench, "tree")


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_tau_is_the_block_size_and_no_depth_is_dead(bench, mode):
    bench.use_perfect_drafter()
    request = replace(bench.unlimited[0], prompt_ids=bench.requests[0].prompt_ids[:7], budget=32, seed=0)
    request = replace(request, max_new_tokens=1 + 6 * BLOCK)
    (truth,) = bench.decoders["autoregressive"].generate([request])
    bench.use_table(perfect_table([text_of(request, truth)], POSITIONS).repeat(CASES, 0))
    (got,) = bench.decoders[mode].generate([request])
    assert got.token_ids == truth.token_ids
    assert got.statistics.tau == BLOCK
    assert got.statistics.rounds == 6
    assert got.statistics.acceptance_by_depth[: BLOCK - 1] == (1.0,) * (BLOCK - 1)


def test_first_tokens_declared_stops_end_every_mode_there(bench):
    """Each of the first tokens in turn, also deep inside an accepted path; streaming never shows a later token."""
    bench.use_perfect_drafter()
    index = next(i for i, c in enumerate(bench.full) if len(c.token_ids) >= 12 and len(set(c.token_ids[:8])) == 8)
    for stop_at in range(8):
        stop = bench.full[index].token_ids[stop_at]
        request = replace(bench.unlimited[index], stop_token_ids=(stop,), budget=32)
        for decoder in bench.decoders.values():
            streamed = list(decoder.stream([request]))
            tokens = [t for commit in streamed for t in commit.token_ids]
            assert tokens == list(bench.full[index].token_ids[: stop_at + 1])
            assert [c.finish_reason for c in streamed][-1] == "stop"
            assert all(c.finish_reason is None for c in streamed[:-1])


@pytest.mark.parametrize("limit", [1, 2, BLOCK, BLOCK + 1])
def test_limits_are_exact_for_every_budget(bench, limit):
    bench.use_perfect_drafter()
    index = next(i for i, c in enumerate(bench.full) if len(c.token_ids) > BLOCK + 1)
    for budget in BUDGETS:
        request = replace(bench.unlimited[index], max_new_tokens=limit, budget=budget)
        for decoder in bench.decoders.values():
            (got,) = decoder.generate([request])
            assert got.token_ids == bench.full[index].token_ids[:limit]
            assert got.finish_reason == "length"


def test_tokens_do_not_depend_on_slot_or_neighbours(bench):
    bench.use_table(np.zeros((CASES, POSITIONS, BLOCK - 1, MODEL.vocab_size), np.float32), scripted=False)
    some = [7, 3, 40, 11, 25]
    together = bench.decoders["tree"].generate([bench.requests[i] for i in some])
    for index, completion in zip(some, together, strict=True):
        (alone,) = bench.decoders["tree"].generate([bench.requests[index]])
        assert completion.token_ids == alone.token_ids == bench.truth[index].token_ids
        assert completion.statistics == alone.statistics


@pytest.mark.parametrize("mode", ["autoregressive", "tree"])
def test_sampled_tokens_are_those_of_the_reference(mode):
    """All modes would agree as well on one shifted position, one seed for all, or one temperature."""
    model = target()
    wide = reference.Target(MODEL, jax.tree.map(lambda a: np.asarray(a, np.float64), stored_params()))
    filters = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01}
    config = DecodeConfig(mode=mode, budget=8, prefill_chunk=16, **filters)
    decoder = Decoder(model, drafter(), config, RUNTIME, slots=2, context=64)
    prompts, seeds = [(5, 9, 31, 2), (5, 9, 31, 2), (7,) * 20], [3, 2**32 - 1, 4]
    requests = [Request(prompt_ids=p, max_new_tokens=20, seed=seed) for p, seed in zip(prompts, seeds, strict=True)]
    for request, completion in zip(requests, decoder.generate(requests), strict=True):
        truth = reference.generate(
            wide, None, request.prompt_ids, 20, "autoregressive", sampling=Sampling(**filters), seed=request.seed
        )
        assert list(completion.token_ids) == truth.token_ids


def test_mask_token_survives_in_prompt_and_output():
    """The drafter's mask id is an ordinary token for the target."""
    params = stored_params()
    weight = np.array(params["lm_head"]["weight"])
    weight[MASK] *= 3  # a large row wins often
    model = Target(MODEL, k2.arrange(params | {"lm_head": {"weight": weight}}, MODEL, RUNTIME))
    request = Request(prompt_ids=(1, MASK, 2, MASK), max_new_tokens=20, seed=0)
    outputs = []
    for mode in ("autoregressive", "tree"):
        decoder = Decoder(model, drafter(), DecodeConfig(mode=mode, budget=8, prefill_chunk=16), RUNTIME, context=64)
        outputs.append(decoder.generate([request])[0].token_ids)
    assert outputs[0] == outputs[1]
    assert MASK in outputs[0] and len(outputs[0]) == 20
