"""The tiktoken model file of Kimi K2.6, and smaller files of the same layout."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from kdjax.errors import KdjaxError
from kdjax.tokenizer import special
from kdjax.tokenizer.chat import ChatTemplate
from kdjax.tokenizer.pattern import SPLIT, chunks
from kdjax.tokenizer.stream import Detokenizer

MODEL_FILE = "tiktoken.model"
TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"


def read_ranks(path: Path) -> list[bytes]:
    """The byte strings of a tiktoken file (lines `base64 rank`), indexed by rank.

    Raises KdjaxError where the file is missing, a line is malformed, ranks are not 0..n-1, or one of the 256 single
    bytes is absent (then some text could not be encoded).
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise KdjaxError(f"{path}: cannot read the tokenizer file ({error.strerror})") from error
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[int(rank)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error) as error:
            raise KdjaxError(
                f"{path}:{number}: expected a line 'base64 rank', got {line[:60]!r}; a Git LFS pointer must be fetched"
            ) from error
    if sorted(ranks) != list(range(len(ranks))):
        raise KdjaxError(f"{path}: ranks are not 0..{len(ranks) - 1} without gaps: the file is incomplete")
    table = [ranks[i] for i in range(len(ranks))]
    if missing := {bytes([b]) for b in range(256)} - set(table):
        raise KdjaxError(f"{path}: {len(missing)} of the 256 single bytes have no rank: the file is incomplete")
    return table


class Tokenizer:
    """Byte-pair encoding over `n` ranks with Kimi's 256 reserved ids at n .. n+255.

    Attributes:
      base: number of ranks = first reserved id (163,584 for K2.6).
      vocab_size: base + 256.
      stop_token_ids: `<|im_end|>` ends a turn; `[EOS]` is the guard. Nothing else stops.
      prompt_prefix: ids put before a raw prompt (`tokenizer_config.json` keys `add_bos_token`, `bos_token`); K2.6 has
        none.
    """

    def __init__(
        self, table: Sequence[bytes], template: ChatTemplate | None = None, prompt_prefix: tuple[int, ...] = ()
    ):
        self.base = len(table)
        self.vocab_size = self.base + special.RESERVED
        self.special_tokens = special.special_tokens(self.base)
        self.bos_id, self.eos_id, self.im_end_id = (self.base + k for k in (special.BOS, special.EOS, special.IM_END))
        self.unk_id, self.pad_id = self.base + special.UNK, self.base + special.PAD
        self.stop_token_ids = frozenset({self.im_end_id, self.eos_id})
        self.template = template or ChatTemplate.default()
        self.prompt_prefix = prompt_prefix
        self._table = table
        self._names = {i: name for name, i in self.special_tokens.items()}
        self._bpe = tiktoken.Encoding(
            "kimi",
            pat_str=SPLIT,
            mergeable_ranks={token: rank for rank, token in enumerate(table)},
            special_tokens=self.special_tokens,
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """From a tiktoken model file alone, with the chat template that ships with kdjax."""
        return cls(read_ranks(Path(path)))

    @property
    def start_id(self) -> int:
        """What a text is scored after: the token that starts a prompt, or `[BOS]` where none does."""
        return self.prompt_prefix[0] if self.prompt_prefix else self.bos_id

    @classmethod
    def from_checkpoint(cls, folder: str | Path) -> Tokenizer:
        """From a checkpoint folder: `tiktoken.model`, and `chat_template.jinja`, `tokenizer_config.json` where present.

        Raises KdjaxError where a file is malformed or `bos_token` is not a reserved token.
        """
        folder = Path(folder)
        table = read_ranks(folder / MODEL_FILE)
        template = folder / TEMPLATE_FILE
        prefix: tuple[int, ...] = ()
        config = folder / CONFIG_FILE
        if config.exists():
            try:
                keys = json.loads(config.read_text())
            except ValueError as error:
                raise KdjaxError(f"{config}: not valid JSON ({error})") from error
            if not isinstance(keys, dict):
                raise KdjaxError(f"{config}: expected an object, not {type(keys).__name__}: download it again")
            if keys.get("add_bos_token", False):
                prefix = (_special_id(keys.get("bos_token"), len(table), config),)
        return cls(table, ChatTemplate.from_file(template) if template.exists() else None, prefix)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`. Names of reserved tokens are ordinary text unless `special` is set."""
        if special:
            return [
                i for part in chunks(text) for i in self._bpe.encode(part, allowed_special="all", disallowed_special=())
            ]
        return [i for part in chunks(text) for i in self._bpe.encode_ordinary(part)]

    def encode_prompt(self, text: str) -> list[int]:
        """A raw prompt to be continued: `prompt_prefix`, then the text with no special meaning for any of it."""
        return [*self.prompt_prefix, *self.encode(text)]

    def encode_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Ids of a rendered conversation; `options` as in `ChatTemplate.render`.

        Reserved names inside a message become reserved ids, as with whole-string encoding in Hugging Face; filter
        untrusted text before.
        """
        return self.encode(self.template.render(messages, **options), special=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one id; for a reserved id, its name. Raises KdjaxError outside the vocabulary."""
        if 0 <= token_id < self.base:
            return self._table[token_id]
        if token_id in self._names:
            return self._names[token_id].encode()
        raise KdjaxError(f"token {token_id} is outside the vocabulary of {self.vocab_size} ids")

    def decode(self, ids: Iterable[int]) -> str:
        """All ids as text, reserved ones by name; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder, one per stream."""
        return Detokenizer(self._table)


def _special_id(name: object, base: int, file: Path) -> int:
    table = special.special_tokens(base)
    if not isinstance(name, str) or name not in table:
        raise KdjaxError(f"{file}: bos_token = {name!r} is not a reserved token: use one such as '[BOS]' or '[EOS]'")
    return table[name]
