"""Texts that a model writes until a stop string, over the slots of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from kdjax.decode import Completion, DecodeConfig, Engine, Request, Stream
from kdjax.decode.programs import Programs
from kdjax.tokenizer import Tokenizer


class Ask(NamedTuple):
    """A request, and the strings before which its text ends."""

    request: Request
    stops: tuple[str, ...] = ()


class Answer(NamedTuple):
    """`text` is what comes before the first stop string or stop token; `finish_reason` is "stop" for both.

    The figures of `completion` take in the whole round in which a stop string was completed.
    """

    text: str
    finish_reason: str
    completion: Completion


def stopping(config: DecodeConfig) -> DecodeConfig:
    """For asks with stop strings: the host looks after each round, so that the figures depend on the text alone."""
    return msgspec.structs.replace(config, rounds_per_call=1)


def complete(decoder: Programs, tokenizer: Tokenizer, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
    """Answers with the index of their ask, as they come; the text of each depends on its ask alone.

    Raises:
        KdjaxError: a request cannot run, or failed.
        ValueError: there are stop strings and the decoder's config is not `stopping`.
    """
    if any(ask.stops for ask in asks) and decoder.config.rounds_per_call != 1:
        raise ValueError("asks with stop strings need a decoder with rounds_per_call=1: see stopping()")
    engine = Engine(decoder)
    streams = [engine.submit(ask.request) for ask in asks]
    texts = [_Text(tokenizer, ask) for ask in asks]
    for stream, token_ids in engine.as_committed(streams):
        if stream.error is not None:
            raise stream.error
        if stream.so_far.finish_reason == "cancelled":
            continue
        text = texts[stream.index]
        text.push(token_ids)
        if text.stopped:
            yield stream.index, _answer(stream, text)._replace(finish_reason="stop")
            stream.cancel()
        elif stream.finished:
            yield stream.index, _answer(stream, text)


def _answer(stream: Stream, text: _Text) -> Answer:
    return Answer(text.cut(), str(stream.so_far.finish_reason), stream.so_far)


class _Text:
    """The bytes of a stream, searched for its stop strings as they come."""

    def __init__(self, tokenizer: Tokenizer, ask: Ask) -> None:
        self._tokenizer, self._skipped = tokenizer, frozenset(ask.request.stop_token_ids)
        self._stops = [stop.encode() for stop in ask.stops]
        self._longest = max(map(len, self._stops), default=1)
        self._data = bytearray()
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> None:
        start = max(len(self._data) - self._longest + 1, 0)
        for token in token_ids:
            if token not in self._skipped:
                self._data += self._tokenizer.token_bytes(token)
        self.stopped = any(self._data.find(stop, start) >= 0 for stop in self._stops)

    def cut(self) -> str:
        ends = [at for stop in self._stops if (at := self._data.find(stop)) >= 0]
        return bytes(self._data[: min(ends, default=len(self._data))]).decode("utf-8", errors="replace")
