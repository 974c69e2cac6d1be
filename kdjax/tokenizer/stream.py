"""Token ids in, displayable text out, one commit at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


class Detokenizer:
    """Decodes the tokens of one stream as they are committed.

    Bytes of an unfinished UTF-8 character are held back until the token that completes it arrives; a stream that ends
    inside a character drops them. Bytes that can never become a character turn into U+FFFD. Reserved ids produce no
    text.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes[id]` is the byte string of every ordinary token; ids beyond it are reserved."""
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that has become complete with these ids; often shorter than the ids, possibly empty."""
        return "".join(self._utf8.decode(self._token_bytes[i]) for i in ids if i < len(self._token_bytes))
