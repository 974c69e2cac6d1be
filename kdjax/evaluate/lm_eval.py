"""A kdjax model for lm-evaluation-harness, so that any of its tasks runs on it (the extra `eval`).

    import lm_eval
    from kdjax.evaluate.lm_eval import KdjaxLM

    lm_eval.simple_evaluate(KdjaxLM(), tasks=["gsm8k"], limit=10)

Generation is decoded by the project's own loops, by default by trees, whose answers are those of plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kdjax.config import DecodeConfig, Sampling
from kdjax.config.generate import ModelSection, RuntimeSection
from kdjax.config.mesh import ONE_DEVICE, MeshConfig
from kdjax.decode import Request
from kdjax.errors import KdjaxError
from kdjax.evaluate import workbench
from kdjax.evaluate.benchmarks.answers import without_thinking
from kdjax.evaluate.completions import Ask, complete, stopping
from kdjax.evaluate.continuations import ContinuationScorer, Tokens, encode_pair
from kdjax.evaluate.rolling import Scorer

try:
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise KdjaxError('the adapter needs lm-evaluation-harness: pip install "kdjax[eval]"') from error

LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens")
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")


class KdjaxLM(LM):
    """A target and, where `decode` drafts, its drafter.

    Args:
        model: which checkpoints.
        decode: mode and budget; a task's own temperature, top_k, top_p and min_p replace those here.
        runtime: numerics.
        mesh: devices.
        slots: texts generated at once.
        rows: texts scored at once.
        max_gen_toks: new tokens of requests that do not say how many.
        thinking: whether chat prompts open the reasoning, which is left out of the answers. For chat only: contexts
            that no chat template rendered are refused (KdjaxError).
        seed: of the sampling noise; request i draws with `seed` + i.

    Raises:
        KdjaxError: a checkpoint is unusable.
    """

    def __init__(
        self,
        model: ModelSection | None = None,
        *,
        decode: DecodeConfig | None = None,
        runtime: RuntimeSection | None = None,
        mesh: MeshConfig = ONE_DEVICE,
        slots: int = 8,
        rows: int = 8,
        max_gen_toks: int = 256,
        thinking: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._model, self._runtime, self._mesh = model or ModelSection(), runtime or RuntimeSection(), mesh
        self._decode, self._slots, self._max_gen_toks = decode or DecodeConfig(), slots, max_gen_toks
        self._thinking, self._seed, self._chat = thinking, seed, False
        self._target, self._tokenizer, numerics = workbench.model(self._model, self._runtime, mesh)
        self._scorer = ContinuationScorer(self._target, numerics, rows=rows)
        self._rolling = Scorer(self._target, numerics, stride=self._target.config.max_position_embeddings)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each continuation, and whether greedy decoding would give it.

        Raises KdjaxError for `thinking` without chat.
        """
        pairs = [self._pair(*request.args) for request in requests]
        found = dict(self._scorer.scores(pairs))
        results = [(found[i].log_likelihood, found[i].is_greedy) for i in range(len(requests))]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of each text after a start token, by disjoint windows."""
        results = []
        for request in requests:
            [text] = request.args
            score = self._rolling.text(text, self._tokenizer.encode, self._tokenizer.start_id)
            results.append(-score.bits * math.log(2))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to a stop string. Too long a context loses its beginning.

        Raises KdjaxError for a generation setting that is not supported, and for `thinking` without chat.
        """
        asks = [self._ask(i, *request.args) for i, request in enumerate(requests)]
        groups: dict[Sampling, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(_sampling(request.args[1]), []).append(i)
        texts: dict[int, str] = {}
        for sampling, members in groups.items():
            for at, text in self._generated(sampling, [asks[i] for i in members]):
                texts[members[at]] = text
                self.cache_hook.add_partial("generate_until", requests[members[at]].args, text)
        return [texts[i] for i in range(len(requests))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation in the model's own format; from then on contexts are read as such."""
        self._chat = True
        return self._tokenizer.template.render(
            chat_history, thinking=self._thinking, add_generation_prompt=add_generation_prompt
        )

    @property
    def tokenizer_name(self) -> str:
        return self._model.target.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Its name: lm-eval records it and uses it in the keys of its caches."""
        return self._tokenizer.template.name if chat_template else None

    def _encoded(self, text: str) -> list[int]:
        if self._thinking and not self._chat:
            raise KdjaxError(
                "thinking=True is for chat only: pass apply_chat_template=True to the harness too, or leave it out"
            )
        return self._tokenizer.encode(text, special=self._chat)

    def _pair(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        if not context:
            return (self._tokenizer.start_id,), tuple(self._encoded(continuation))
        before, after = encode_pair(self._encoded, context, continuation)
        return ((*self._prefix, *before) or (self._tokenizer.start_id,)), after

    @property
    def _prefix(self) -> Tokens:
        return () if self._chat else self._tokenizer.prompt_prefix

    def _ask(self, index: int, context: str, settings: Mapping[str, Any]) -> Ask:
        limit = self._target.config.max_position_embeddings
        new = next((int(settings[key]) for key in LENGTH_KEYS if key in settings), self._max_gen_toks)
        if not 1 <= new < limit:
            raise KdjaxError(f"max_gen_toks = {new} must lie in 1 to {limit - 1}, the model's context less the prompt")
        ids = [*self._prefix, *self._encoded(context)] or [self._tokenizer.start_id]
        until = settings.get("until") or ()
        request = Request(
            prompt_ids=tuple(ids[-(limit - new) :]),
            max_new_tokens=new,
            seed=(self._seed + index) % 2**32,
            stop_token_ids=tuple(sorted(self._tokenizer.stop_token_ids | set(self._target.config.eos_token_ids))),
        )
        return Ask(request, (until,) if isinstance(until, str) else tuple(stop for stop in until if stop))

    def _generated(self, sampling: Sampling, asks: Sequence[Ask]) -> list[tuple[int, str]]:
        fields = {name: getattr(self._decode, name) for name in DecodeConfig.__struct_fields__}
        fields |= {name: getattr(sampling, name) for name in SAMPLING_KEYS}
        context = workbench.context_for([ask.request for ask in asks])
        decoder = workbench.decoder(
            self._model, self._runtime, stopping(DecodeConfig(**fields)), self._slots, context, self._mesh
        )
        answers = complete(decoder, self._tokenizer, asks)
        return [(at, without_thinking(answer.text, thinking=self._thinking) or "") for at, answer in answers]


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    """Raises KdjaxError for a key that kdjax does not know."""
    known = {*LENGTH_KEYS, *SAMPLING_KEYS, "until", "do_sample"}
    if unknown := [key for key in settings if key not in known]:
        raise KdjaxError(f"generation_kwargs has {unknown[0]!r}: kdjax knows {', '.join(sorted(known))}")
    if not settings.get("do_sample", settings.get("temperature", 0) > 0):
        return Sampling()
    return Sampling(
        temperature=float(settings.get("temperature", 1.0)),
        top_k=int(settings.get("top_k", 0)),
        top_p=float(settings.get("top_p", 1.0)),
        min_p=float(settings.get("min_p", 0.0)),
    )
