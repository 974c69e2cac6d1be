"""Kimi's tokenizer: tiktoken ranks, reserved ids above them, chat template, incremental detokeniser."""

from kdjax.tokenizer.stream import Detokenizer as Detokenizer
from kdjax.tokenizer.tokenizer import Tokenizer as Tokenizer
