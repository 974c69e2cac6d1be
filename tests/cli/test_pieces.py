"""Prompts, live text, the report and the cache folder, without a model."""

import io
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.status import Status

from kdjax.cli import progress, prompts, report
from kdjax.cli.interrupt import Interrupt
from kdjax.cli.live import Live
from kdjax.cli.report import Outcome
from kdjax.cli.start import cache_folder
from kdjax.decode import Completion, Statistics, Timings


def completion(ids, rounds, by_depth, seconds=0.5, reason="length"):
    statistics = Statistics(rounds, len(ids) - 1, by_depth)
    return Completion(tuple(ids), reason, statistics, Timings(prefill=1.0, compile=2.0, decode=seconds))


A = completion([5, 6, 7, 8, 9, 4], 2, (1, 1, 1))
B = completion([5, 6], 1, (0, 0, 0), seconds=0.2, reason="stop")
BOTH = Outcome([A, B], [0, 1])


def test_prompts_come_from_arguments_files_and_stdin_as_they_stand(tmp_path, monkeypatch):
    file = tmp_path / "p.txt"
    file.write_text("from file\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("é\n".encode())))
    assert prompts.read(["one", "-"], [file]) == ["one", "é\n", "from file\n"]


def test_json_object_has_the_promised_keys_and_types():
    plain = report.as_json(["ab", "c"], {"tree": BOTH}, "xla")
    assert (plain["text"], plain["new_tokens"], plain["backend"]) == ("ab\nc", 8, "xla")
    assert plain["tau_micro"] == 2.0 and plain["tau_macro"] == (2.5 + 1) / 2
    assert plain["acceptance_by_depth"] == [pytest.approx(1 / 3), 1.0, 1.0]
    assert plain["streams"][1] | {"token_ids": [5, 6], "finish_reason": "stop", "text": "c"} == plain["streams"][1]
    assert "identical" not in plain and "modes" not in plain


def test_comparison_is_over_the_tokens_of_every_prompt():
    modes = {"tree": BOTH, "chain": BOTH, "autoregressive": Outcome([A, B], [0, 1])}
    compared = json.loads(json.dumps(report.as_json(["ab", "c"], modes, "xla")))
    assert compared["identical"] is True and set(compared["modes"]) == {"tree", "chain", "autoregressive"}
    assert compared["modes"]["chain"]["token_ids"] == [5, 6, 7, 8, 9, 4, 5, 6]
    modes["chain"] = Outcome([A, completion([5, 7], 1, (0, 0, 0))], [0, 1])
    assert report.as_json(["ab", "c"], modes, "xla")["identical"] is False


def test_speed_counts_verify_rounds_over_the_time_of_the_busiest_slot():
    assert BOTH.tokens_per_s == (5 + 1) / 0.5
    assert Outcome([A, B], [0, 0]).tokens_per_s == pytest.approx((5 + 1) / 0.7)
    assert Outcome([None], [None]).tokens_per_s == 0.0


def test_a_prompt_that_was_never_begun_is_shown_as_such():
    cut = report.as_json(["ab", ""], {"tree": Outcome([A, None], [0, None])}, "xla")
    assert cut["streams"][1]["finish_reason"] is None and cut["new_tokens"] == 6 and cut["tau_macro"] == 2.5


def test_table_states_the_definition_and_has_no_colour_off_a_terminal():
    out = io.StringIO()
    other = Outcome([completion([5, 7], 1, ())], [0])
    report.show({"tree": BOTH, "autoregressive": other}, "xla", Console(file=out))
    text = out.getvalue()
    assert "\x1b" not in text and "DIFFERENT" in text and "speed-up" in text
    assert "bonus included" in " ".join(text.split()) and "accepted at depth 3" in text
    assert f"compilation {BOTH.compile_seconds + other.compile_seconds:.2f} s of all modes" in text
    assert "interrupted" not in text
    assert [line.split()[-2:] for line in text.splitlines() if "verify passes" in line] == [["3", "1"]]


def test_why_a_text_ended():
    assert report.ending(Outcome([A], [0])) == "stopped after 6 tokens, at the most new tokens (-n)"
    ended = "stopped: 1 of 3 at the most new tokens (-n), 1 of 3 at an end token, 1 of 3 by Ctrl-C"
    assert report.ending(Outcome([A, B, None], [0, 1, None])) == ended


def test_ctrl_c_ends_the_iteration_and_not_the_thread_inside_it(foreground):
    kept, release = threading.Event(), threading.Event()
    items = []

    def source():
        yield 1
        kept.wait(60)
        os.kill(os.getpid(), signal.SIGINT)  # handled in the main thread, which waits for the next item
        release.wait(60)
        yield 2

    with Interrupt().handled() as interrupt:
        for item in interrupt.iterate(source()):
            items.append(item)
            kept.set()
        assert items == [1] and interrupt.pressed and interrupt.abandoned
        release.set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_iteration_without_ctrl_c_is_complete_and_raises_what_its_source_raises():
    interrupt = Interrupt()
    assert list(interrupt.iterate(iter("abc"))) == ["a", "b", "c"] and not interrupt.abandoned
    with pytest.raises(ZeroDivisionError):
        list(interrupt.iterate(1 // n for n in (1, 0)))


def test_a_thread_that_raised_is_not_abandoned(monkeypatch):
    """However long it takes to end: what has abandoned a thread ends the process, also that of a caller of `main`."""

    class Slow(threading.Thread):
        def run(self):
            super().run()
            time.sleep(0.2)

    monkeypatch.setattr(threading, "Thread", Slow)
    interrupt = Interrupt()
    with pytest.raises(ZeroDivisionError):
        list(interrupt.iterate(1 // n for n in (1, 0)))
    assert not interrupt.abandoned


def test_one_stream_is_shown_as_it_grows():
    out = io.StringIO()
    live = Live(["p"], Console(file=out))
    live.write(0, "ab")
    assert out.getvalue() == "ab"
    live.write(0, "c")
    live.finish(0)
    assert out.getvalue() == "abc\n" and live.texts == ["abc"]


def test_several_streams_do_not_interleave():
    out = io.StringIO()
    live = Live(["p", "q", "r"], Console(file=out))
    live.write(1, "second ")
    live.write(0, "first")
    live.finish(1)
    live.write(0, " more\n")
    live.finish(0)
    live.write(2, "cut")
    live.interrupt()
    headed = "==> prompt 1 of 3 <==\nfirst more\n==> prompt 2 of 3 <==\nsecond \n==> prompt 3 of 3 <==\ncut\n"
    assert out.getvalue() == headed


def test_cache_folder_follows_the_environment(monkeypatch):
    for name in ("KDJAX_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/h")
    assert cache_folder() == Path("/h/.cache/kdjax/xla")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/kdjax/xla")
    monkeypatch.setenv("KDJAX_CACHE_DIR", "/k")
    assert cache_folder() == Path("/k/xla")


def test_a_slow_load_says_how_far_it_is_and_how_long_it_takes(monkeypatch):
    clock = iter([100.0, 100.5, 110.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    status = Status("starting", console=Console(file=io.StringIO()))
    tell = progress.progress_in(status)
    tell(10**9, 10**10)
    assert status.status == "starting"
    tell(4 * 10**9, 10**10)
    assert status.status == "reading weights: 4.0 GB of 10.0 GB, 400.0 MB/s, 0:00:15 left"
