"""Requests that come and go: each gets the tokens that it would get alone, whatever happens to the others."""

import dataclasses
import threading
import time
import weakref

import jax
import numpy as np
import pytest

from kdjax.decode import DecodeConfig, Decoder, Engine, Request
from kdjax.decode.state import Reason
from kdjax.errors import KdjaxError
from tests.decode.models import MODEL, RUNTIME, drafter, target

CHUNK = 8
TEXT = tuple(np.random.default_rng(3).integers(0, MODEL.vocab_size, 64).tolist())


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    config = DecodeConfig(budget=6, prefill_chunk=CHUNK, temperature=0.8, rounds_per_call=3)
    return Decoder(target(), drafter(), config, RUNTIME, slots=2, context=64)


def request(length: int, new: int = 12, **fields) -> Request:
    return Request(prompt_ids=TEXT[:length], max_new_tokens=new, **fields)


def alone(decoder: Decoder, one: Request) -> tuple[int, ...]:
    return decoder.generate([one])[0].token_ids


def test_streams_of_all_lengths_limits_seeds_and_stops_equal_cold_runs(decoder):
    requests = [request(n, new, seed=n, budget=b) for n, new, b in ((3, 9, 6), (40, 20, 2), (17, 1, 0), (33, 24, None))]
    stop = alone(decoder, requests[3])[5]
    requests.append(request(33, 24, seed=33, stop_token_ids=(stop,)))
    engine = Engine(decoder)
    streams = [engine.submit(one) for one in requests]
    pieces = {stream.index: [] for stream in streams}
    for stream, token_ids in engine.as_committed(streams):
        pieces[stream.index].append(token_ids)
    for one, stream in zip(requests, streams, strict=True):
        truth = decoder.generate([one])[0]
        got = stream.result()
        assert got.token_ids == truth.token_ids == tuple(t for piece in pieces[stream.index] for t in piece)
        assert (got.finish_reason, got.statistics) == (truth.finish_reason, truth.statistics)
    assert streams[4].result().finish_reason == "stop" and len(pieces[1]) > 2
    assert list(streams[0]) == []  # every token was taken before


def test_requests_that_come_while_others_run_are_served_next(decoder):
    engine = Engine(decoder)
    first = engine.submit(request(20, 40, seed=1))
    pieces = iter(first)
    early = next(pieces) + next(pieces)
    second = engine.submit(request(9, 8, seed=2))
    assert second.result().token_ids == alone(decoder, second.request)
    assert not first.finished
    assert early + tuple(t for piece in pieces for t in piece) == alone(decoder, first.request)


def test_larger_priorities_are_taken_first_and_equal_ones_in_order(decoder):
    engine = Engine(decoder)
    order = []
    streams = [engine.submit(request(5, 1, seed=i), priority=p) for i, p in enumerate((0, 2, -1, 2, 7))]
    for stream, _ in engine.as_committed(streams):
        order.append(stream.index)
    assert order == [4, 1, 3, 0, 2]
    order.clear()
    streams = [engine.submit(request(5, 1), priority=p) for p in (0, 2, 3, 1)]
    streams[2].cancel()
    for stream, _ in engine.as_committed(streams):
        order.append(stream.index - 5)
    assert order == [2, 1, 3, 0]


def test_a_prefix_is_read_once_and_changes_no_token(decoder, monkeypatch):
    shared, tails = TEXT[:35], [(1, 2, 3), (4,), (1, 2, 9, 9), ()]
    requests = [Request(prompt_ids=(*shared, *tail), max_new_tokens=10, seed=i) for i, tail in enumerate(tails)]
    truths = [decoder.generate([one])[0] for one in requests]
    prefill, read = decoder.prefill, []

    def counting(compiled, state, slot, one, held):
        read.append(len(one.prompt_ids) - held)
        return prefill(compiled, state, slot, one, held)

    monkeypatch.setattr(decoder, "prefill", counting)
    engine = Engine(decoder)
    streams = [engine.submit(one) for one in requests]
    for truth, stream in zip(truths, streams, strict=True):
        assert stream.result().token_ids == truth.token_ids
        assert stream.result().statistics == truth.statistics  # the drafter's rows are shared as well
    assert engine.prompt_tokens.read == sum(read)
    monkeypatch.undo()
    whole = len(shared) // CHUNK * CHUNK
    total = sum(len(one.prompt_ids) for one in requests)
    assert engine.prompt_tokens == (total - 3 * whole, 3 * whole)
    # A prompt of whole chunks that was read before: its last chunk is read again, for its logits.
    again = engine.submit(request(16, 3))
    assert again.result().token_ids == alone(decoder, again.request)
    assert engine.prompt_tokens.shared == 3 * whole + 8
    other = engine.submit(Request(prompt_ids=(TEXT[0] ^ 1, *TEXT[1:30]), max_new_tokens=3))
    assert other.result().token_ids == alone(decoder, other.request)
    assert engine.prompt_tokens.shared == 3 * whole + 8


def test_cancelled_requests_end_at_once_and_free_their_slot(decoder):
    engine = Engine(decoder)
    endless, waiting, other = (engine.submit(request(4, 60, seed=i)) for i in (0, 1, 2))
    last = engine.submit(request(11, 5, seed=3), priority=-1)
    other.cancel()  # before it ran
    assert other.result().finish_reason == "cancelled" and other.result().token_ids == ()
    some = next(iter(endless))
    endless.cancel()
    endless.cancel()
    assert endless.result().finish_reason == "cancelled"
    assert endless.result().token_ids[: len(some)] == some == alone(decoder, endless.request)[: len(some)]
    assert last.result().token_ids == alone(decoder, last.request)
    assert not waiting.finished  # so `last` ran in the slot of `endless`
    assert waiting.result().token_ids == alone(decoder, waiting.request)
    waiting.cancel()
    assert waiting.result().finish_reason == "length"
    gone, stays = engine.submit(request(4, 60)), engine.submit(request(5, 9))
    next(iter(gone))
    gone.cancel()
    assert stays.result().token_ids == alone(decoder, stays.request)
    assert Reason.RUNNING not in engine._batch._state.reason.tolist()


def test_what_comes_after_a_cancellation_is_dropped(decoder, monkeypatch):
    engine = Engine(decoder)
    stream = engine.submit(request(4, 6))
    step = engine._batch.step
    monkeypatch.setattr(engine._batch, "step", lambda: (step(), stream.cancel())[0])
    assert (stream.result().token_ids, stream.result().finish_reason) == ((), "cancelled")


def test_tokens_that_come_while_others_are_taken_are_not_lost(decoder, monkeypatch):
    stream = Engine(decoder).submit(request(4, 20))
    take = stream.take

    def slow():
        taken = take()
        stream.result()  # as another thread that waits for it
        return taken

    monkeypatch.setattr(stream, "take", slow)
    assert tuple(t for piece in stream for t in piece) == alone(decoder, stream.request)


def test_others_submit_while_the_device_works(decoder, monkeypatch):
    engine = Engine(decoder)
    step, waits = engine._batch.step, []

    def while_another_submits():
        other = threading.Thread(target=engine.submit, args=(request(4, 1),), daemon=True)
        other.start()
        other.join(timeout=20)
        waits.append(other.is_alive())
        monkeypatch.undo()
        return step()

    monkeypatch.setattr(engine._batch, "step", while_another_submits)
    assert engine.submit(request(4, 1)).result() and waits == [False]


def test_a_finished_stream_is_forgotten(decoder):
    engine = Engine(decoder)
    stream = engine.submit(request(4, 3))
    stream.result()
    forgotten = weakref.ref(stream)
    del stream
    assert forgotten() is None


def test_seconds_of_streams_one_after_another_fit_into_the_time_that_passed(decoder):
    engine, began, spent = Engine(decoder), time.perf_counter(), 0.0
    for one in (request(40, 24), request(33, 24, seed=1), request(35, 24, seed=2)):
        timings = engine.submit(one).result().timings
        assert timings.prefill > 0 and timings.decode > 0
        spent += timings.prefill + timings.decode
    assert 0 < timings.compile < spent + timings.compile <= time.perf_counter() - began


def test_a_refused_request_touches_nothing(decoder):
    engine = Engine(decoder)
    good = engine.submit(request(4, 6))
    with pytest.raises(KdjaxError, match="request 1: prompt_ids has token 99 outside the vocabulary"):
        engine.submit(Request(prompt_ids=(99,), max_new_tokens=2))
    with pytest.raises(KdjaxError, match="request 1: prompt_ids has 'i', which is no token id"):
        engine.submit(Request(prompt_ids="import", max_new_tokens=2))
    with pytest.raises((KdjaxError, TypeError), match="priority"):  # TypeError: where tests check types
        engine.submit(request(4, 6), priority="x")
    assert engine.submit(request(4, 6, seed=1)).index == 1
    assert good.result().token_ids == alone(decoder, good.request)


def test_logits_that_are_not_finite_fail_one_request_only():
    model = target()
    poison = 47  # a token of one prompt; greedy text never has it
    table = np.array(model.params["embed_tokens"]["weight"])
    table[poison] = np.nan
    params = model.params | {"embed_tokens": {"weight": table}}
    config = DecodeConfig(mode="autoregressive", prefill_chunk=CHUNK)
    one = Decoder(dataclasses.replace(model, params=params), None, config, RUNTIME, slots=2, context=64)
    engine = Engine(one)
    good, bad = engine.submit(request(9, 14)), engine.submit(Request(prompt_ids=(1, poison), max_new_tokens=9))
    later = engine.submit(request(12, 5))
    with pytest.raises(KdjaxError, match="request 1: the logits at position 1 have no finite maximum"):
        bad.result()
    clean = Decoder(model, None, config, RUNTIME, context=64)
    for stream in (good, later):
        assert poison not in stream.result().token_ids
        assert stream.result().token_ids == alone(clean, stream.request)


@pytest.mark.parametrize("drafts", [False, True], ids=["autoregressive", "tree"])
@pytest.mark.parametrize("slots", [1, 2])
def test_what_a_failed_request_leaves_in_its_slot_harms_no_other(slots, drafts):
    """Its rows are NaN behind the end of the next prompt, which may also share rows with it."""
    model, poison = target(), 47
    table = np.array(model.params["embed_tokens"]["weight"])
    table[poison] = np.nan
    params = model.params | {"embed_tokens": {"weight": table}}
    config = DecodeConfig(mode="tree" if drafts else "autoregressive", budget=6, prefill_chunk=CHUNK)
    own = drafter() if drafts else None
    engine = Engine(Decoder(dataclasses.replace(model, params=params), own, config, RUNTIME, slots=slots, context=64))
    prompt = tuple(token for token in TEXT if token != poison)[:30]
    running = engine.submit(Request(prompt_ids=prompt[3:9], max_new_tokens=30)) if slots == 2 else None
    bad = engine.submit(Request(prompt_ids=(*prompt, poison), max_new_tokens=9))
    others = [engine.submit(Request(prompt_ids=prompt[: CHUNK + 2], max_new_tokens=12, seed=i)) for i in range(2)]
    others.append(engine.submit(Request(prompt_ids=prompt[20:23], max_new_tokens=12)))
    with pytest.raises(KdjaxError, match="request [01]: the logits at position 30 have no finite maximum"):
        bad.result()
    clean = Decoder(model, own, config, RUNTIME, context=64)
    for stream in [*others, *([running] if running else [])]:
        assert stream.result().token_ids == alone(clean, stream.request)


def test_a_call_that_fails_ends_what_runs_and_spares_what_waits(decoder, monkeypatch):
    engine = Engine(decoder)
    running = [engine.submit(request(6, 30, seed=i)) for i in range(2)]
    waiting = engine.submit(request(7, 8, seed=5))
    got = [next(iter(stream)) for stream in running]
    launch, calls = engine._batch._launch, []

    def once():
        calls.append(0)
        if len(calls) == 1:
            for leaf in jax.tree.leaves(engine._batch._state):  # donated to the call
                leaf.delete()
            raise RuntimeError("out of memory\nwhile allocating")
        return launch()

    monkeypatch.setattr(engine._batch, "_launch", once)
    assert waiting.result().token_ids == alone(decoder, waiting.request)
    for stream, tokens in zip(running, got, strict=True):
        with pytest.raises(KdjaxError, match=r"device call failed \(RuntimeError: out of memory\): submit it again$"):
            stream.result()
        assert stream.so_far.token_ids[: len(tokens)] == tokens
    again = engine.submit(running[0].request)
    assert again.result().token_ids == alone(decoder, again.request)

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._batch, "_launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.submit(request(6, 30)).result()


def test_streams_are_read_from_many_threads(decoder):
    engine = Engine(decoder)
    requests = [request(3 + 5 * i, 10 + i, seed=i) for i in range(6)]
    got: dict[int, tuple[int, ...]] = {}

    def serve(i: int) -> None:
        got[i] = tuple(t for piece in engine.submit(requests[i]) for t in piece)

    threads = [threading.Thread(target=serve, args=(i,), daemon=True) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert got == {i: alone(decoder, one) for i, one in enumerate(requests)}
