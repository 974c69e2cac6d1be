"""What is asked of a decoder, as data: nothing here is compiled in."""

from __future__ import annotations

import numbers

import msgspec

from kdjax.config import ModelConfig
from kdjax.config.decode import need_integers
from kdjax.errors import KdjaxError

MAX_STOP_TOKENS = 16
"""Stop ids per request that a compiled program has room for."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One stream. The tokens depend on these fields and the decode config alone, not on slot or batch.

    A decoder refuses what cannot run (KdjaxError): an empty prompt, tokens outside the vocabulary, more tokens than its
    context, more than 16 stop tokens.

    Attributes:
        prompt_ids: at least one.
        max_new_tokens: at most; at least 1.
        seed: of the sampling noise, in [0, 2^32).
        stop_token_ids: a stop token is emitted and ends the stream.
        budget: lowers the tree budget of this request; None is the decoder's.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    budget: int | None = None


def shortened(value: object) -> str:
    """A value for an error's one line."""
    said = " ".join(repr(value).split())
    return said if len(said) <= 60 else f"{said[:57]}..."


def check_request(request: Request, index: int, model: ModelConfig, context: int, budget: int) -> None:
    """Raises KdjaxError where the request cannot run. `context` is tokens per slot, `budget` the compiled limit."""
    where = f"request {index}"
    if not isinstance(request, Request):
        raise KdjaxError(
            f"{where} is {shortened(request)}, no kdjax.Request: encode text with the tokenizer and give "
            "Request(prompt_ids=..., max_new_tokens=...)"
        )
    need_integers(f"{where}: ", max_new_tokens=request.max_new_tokens, seed=request.seed)
    if request.budget is not None:
        need_integers(f"{where}: ", budget=request.budget)
    for name in ("prompt_ids", "stop_token_ids"):
        if bad := [token for token in getattr(request, name) if not isinstance(token, numbers.Integral)]:
            raise KdjaxError(f"{where}: {name} has {bad[0]!r}, which is no token id: encode text with the tokenizer")
    prompt = len(request.prompt_ids)
    if not prompt:
        raise KdjaxError(f"{where}: the prompt is empty: give at least one token, such as the BOS token")
    if request.max_new_tokens < 1:
        raise KdjaxError(f"{where}: max_new_tokens={request.max_new_tokens} must be at least 1")
    if prompt >= context:
        raise KdjaxError(f"{where}: the prompt has {prompt} tokens, the context holds {context}: shorten the prompt")
    if prompt + request.max_new_tokens > context:
        raise KdjaxError(
            f"{where}: {prompt} prompt tokens and max_new_tokens={request.max_new_tokens} exceed the context of "
            f"{context}: lower max_new_tokens to {context - prompt}"
        )
    for name in ("prompt_ids", "stop_token_ids"):
        if bad := [token for token in getattr(request, name) if not 0 <= token < model.vocab_size]:
            raise KdjaxError(
                f"{where}: {name} has token {bad[0]} outside the vocabulary of {model.vocab_size}: "
                "use the tokenizer of this checkpoint"
            )
    if len(set(request.stop_token_ids)) > MAX_STOP_TOKENS:
        raise KdjaxError(
            f"{where}: {len(set(request.stop_token_ids))} stop tokens, at most {MAX_STOP_TOKENS} fit: drop some"
        )
    if not 0 <= request.seed < 2**32:
        raise KdjaxError(f"{where}: seed={request.seed} must lie in [0, 2^32)")
    if request.budget is not None and not 0 <= request.budget <= budget:
        raise KdjaxError(
            f"{where}: budget={request.budget} exceeds the compiled limit of {budget}: lower it or raise the decoder's"
            if request.budget > budget
            else f"{where}: budget={request.budget} is negative: use 0 for autoregressive decoding"
        )
