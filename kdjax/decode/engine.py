"""Requests that come and go while others run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from kdjax.decode.batch import Batch, Failure, PromptTokens
from kdjax.decode.completion import Commit, Completion, Statistics, Timings
from kdjax.decode.programs import Programs
from kdjax.decode.request import Request, check_request
from kdjax.errors import KdjaxError


class Stream:
    """A submitted request. Iterating gives its token ids as they commit, several at a time.

    Attributes:
        request: what was submitted.
        index: number of requests submitted to the engine before; errors name it.
        so_far: the completion up to now, complete when `finished`.
        error: why it failed, None where it did not.
    """

    def __init__(self, engine: Engine, request: Request, index: int):
        self.request, self.index = request, index
        self.error: KdjaxError | None = None
        none = Statistics(0, 0, (0,) * engine.depth)
        self.so_far = Completion((), None, none, Timings(0.0, 0.0, 0.0))
        self._engine, self._taken = engine, 0

    @property
    def finished(self) -> bool:
        """Whether it has ended, be it by an error or by `cancel`."""
        return self.error is not None or self.so_far.finish_reason is not None

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Tokens that were not given before; waits for more until the stream is finished.

        Raises:
            KdjaxError: the request failed. The tokens up to then are given first.
        """
        for _, token_ids in self._engine.as_committed([self]):
            if token_ids:
                yield token_ids
        if self.error is not None:
            raise self.error

    def result(self) -> Completion:
        """Waits for the end. A cancelled stream has the tokens up to then and `finish_reason` "cancelled".

        Raises:
            KdjaxError: the request failed.
        """
        self._engine.drive(lambda: self.finished)
        if self.error is not None:
            raise self.error
        return self.so_far

    def cancel(self) -> None:
        """Ends the stream at once; its slot is free after the call that runs now. Too late, it changes nothing."""
        self._engine.cancel(self)

    def has_news(self) -> bool:
        """Whether `take` would give tokens, or the stream is finished."""
        return len(self.so_far.token_ids) > self._taken or self.finished

    def take(self) -> tuple[int, ...]:
        """The tokens since the last take or step of an iteration; does not wait."""
        fresh = self.so_far.token_ids[self._taken :]
        self._taken += len(fresh)
        return fresh


class Engine:
    """Serves requests over the slots of a decoder, each with its own length, limit, seed, stops, budget and priority.

    There is no thread of its own: whoever waits for a stream runs the device for all of them, one caller at a time, so
    that streams may be read from one thread or from many. What one request does to itself (cancelled, refused, logits
    that are not finite) leaves the others alone, token for token. A call that fails on the device ends the streams that
    were running, each with an error; those that wait go on in fresh slots.

    A prompt that starts like the prompt of a slot takes over its cache rows, in whole chunks of `prefill_chunk` tokens:
    requests with the same long prefix pay for it once, and get the tokens that they would get alone.

    Args:
        decoder: models, config and slots. Each slot has room for its `context`: choose it as small as requests allow.
    """

    def __init__(self, decoder: Programs):
        self._decoder = decoder
        self._batch = Batch(decoder, decoder.capacity_for(decoder.context), share_prefixes=True)
        self._turn = threading.Condition()
        self._driven = False
        self._submitted = 0
        self._streams: dict[int, Stream] = {}
        self._arrived: list[tuple[Stream, int]] = []
        self._cancelled: list[int] = []

    @property
    def depth(self) -> int:
        """Drafted tokens that one round can accept."""
        return self._decoder.program.depth

    @property
    def prompt_tokens(self) -> PromptTokens:
        """Prompt tokens read so far, and those that were shared instead."""
        return self._batch.prompt_tokens

    def submit(self, request: Request, *, priority: int = 0) -> Stream:
        """Returns at once; the request runs while somebody waits for this stream or another one.

        Free slots take the waiting request of the largest priority, then the first submitted. What runs stays.

        Raises:
            KdjaxError: the request cannot run; nothing else is touched.
        """
        if not isinstance(priority, int):
            raise KdjaxError(f"priority={priority!r} must be an integer: larger ones go first")
        with self._turn:
            decoder = self._decoder
            check_request(request, self._submitted, decoder.program.model, decoder.context, decoder.config.budget)
            stream = Stream(self, request, self._submitted)
            self._submitted += 1
            self._streams[stream.index] = stream
            self._arrived.append((stream, priority))
        return stream

    def as_committed(self, streams: Sequence[Stream]) -> Iterator[tuple[Stream, tuple[int, ...]]]:
        """Tokens of several streams in the order they come, until all are finished.

        Each stream comes once more, maybe without tokens, when it is finished. Failures are not raised: see `error`.
        """
        pending = list(streams)
        while pending:
            self.drive(lambda: any(stream.has_news() for stream in pending))
            for stream in [stream for stream in pending if stream.has_news()]:
                finished = stream.finished  # looked at first: tokens that come in between are taken
                if finished:
                    pending.remove(stream)
                yield stream, stream.take()

    def cancel(self, stream: Stream) -> None:
        """`Stream.cancel`."""
        with self._turn:
            if not stream.finished:
                stream.so_far = stream.so_far._replace(finish_reason="cancelled")
                self._cancelled.append(stream.index)
                self._turn.notify_all()

    def drive(self, enough: Callable[[], bool]) -> None:
        """Runs the device, or waits for the thread that does, until `enough()`."""
        with self._turn:
            while not enough():
                if self._driven:
                    self._turn.wait()
                    continue
                self._driven = True
                # Free while the device works: others submit, cancel and read what has come.
                self._turn.release()
                try:
                    events = self._step()
                finally:
                    self._turn.acquire()
                    self._driven = False
                    self._turn.notify_all()
                self._deliver(events)

    def _step(self) -> Sequence[Commit | Failure]:
        with self._turn:
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
        for stream, priority in arrived:
            self._batch.add(stream.index, stream.request, priority)
        try:
            for index in cancelled:
                self._batch.remove(index)
            return self._batch.step()
        except BaseException as error:
            lost = self._batch.drop_running()
            with self._turn:
                self._deliver([Failure(index, _call_failed(index, error)) for index in lost])
            # Without a request to blame it would happen again and again.
            if not lost or not isinstance(error, Exception):
                raise
            return []

    def _deliver(self, events: Sequence[Commit | Failure]) -> None:
        for event in events:
            stream = self._streams.get(event.request)
            if stream is None or stream.finished:  # cancelled meanwhile
                continue
            if isinstance(event, Failure):
                stream.error = event.error
            else:
                stream.so_far = event.so_far
        for index in [index for index, stream in self._streams.items() if stream.finished]:
            del self._streams[index]


def _call_failed(index: int, error: BaseException) -> KdjaxError:
    said = (str(error).splitlines() or [""])[0]
    failure = KdjaxError(f"request {index}: a device call failed ({type(error).__name__}: {said}): submit it again")
    failure.__cause__ = error
    return failure
