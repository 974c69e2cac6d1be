"""One round at a time refuses what a decoder would."""

import pytest

from experiments.rounds import observe
from kdjax.decode import DecodeConfig, Decoder, Request
from kdjax.errors import KdjaxError
from tests.decode.models import RUNTIME, drafter, target


def test_a_request_beyond_the_context_is_refused():
    decoder = Decoder(target(), drafter(), DecodeConfig(budget=3), RUNTIME, context=64)
    request = Request(prompt_ids=(5, 9), max_new_tokens=63)
    with pytest.raises(KdjaxError, match="exceed the context of 64: lower max_new_tokens to 62"):
        next(observe(decoder, [request]))
