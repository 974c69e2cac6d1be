"""Completions of requests that are all known at the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kdjax.decode.batch import Batch, Failure
from kdjax.decode.completion import Commit, Completion
from kdjax.decode.programs import Programs
from kdjax.decode.request import Request, check_request, shortened
from kdjax.errors import KdjaxError


class Decoder(Programs):
    """Decodes requests over `slots` streams; see `Programs` for its arguments and what it raises."""

    def stream(self, requests: Sequence[Request]) -> Iterator[Commit]:
        """Committed tokens as they come. A free slot takes the next waiting request.

        All requests are checked before any runs.

        Raises:
            KdjaxError: a request cannot run, or the model's logits are not finite.
        """
        if isinstance(requests, Request | str):
            raise KdjaxError(f"{shortened(requests)} is no list of requests: put a single kdjax.Request in brackets")
        for index, request in enumerate(requests):
            check_request(request, index, self.program.model, self.context, self.config.budget)
        return self._stream(requests)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests; see `stream`."""
        done = {commit.request: commit.so_far for commit in self.stream(requests)}
        return [done[index] for index in range(len(requests))]

    def _stream(self, requests: Sequence[Request]) -> Iterator[Commit]:
        if not requests:
            return
        longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
        batch = Batch(self, self.capacity_for(longest))
        for index, request in enumerate(requests):
            batch.add(index, request)
        while batch.busy:
            for event in batch.step():
                if isinstance(event, Failure):
                    raise event.error
                yield event
