"""Text on the terminal while it is decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text


class Live:
    """Shows one stream as it grows; with several, the others wait their turn, so that texts do not interleave.

    On a terminal the prompt precedes its continuation, dimmed. Elsewhere a single prompt gives its continuation alone,
    and several are separated by `==> prompt i of n <==` lines. `before` is called once, ahead of the first output.
    """

    def __init__(self, prompts: Sequence[str], console: Console, before: Callable[[], None] = lambda: None) -> None:
        self._prompts = prompts
        self._console = console
        self._texts = ["" for _ in prompts]
        self._done = [False for _ in prompts]
        self._before = before
        self._current = -1

    def write(self, stream: int, text: str) -> None:
        self._begin()
        self._texts[stream] += text
        if stream == self._current and text:
            self._show(text)

    def finish(self, stream: int) -> None:
        self._done[stream] = True
        while self._current < len(self._prompts) and self._done[self._current]:
            self._end_line()
            self._next()

    def interrupt(self) -> None:
        """Shows what the waiting streams have so far."""
        self._begin()
        for stream in range(len(self._prompts)):
            self.finish(stream)

    @property
    def texts(self) -> list[str]:
        return list(self._texts)

    def _begin(self) -> None:
        if self._current < 0:
            self._before()
            self._next()

    def _next(self) -> None:
        self._current += 1
        if self._current == len(self._prompts):
            return
        if len(self._prompts) > 1:
            self._show(f"==> prompt {self._current + 1} of {len(self._prompts)} <==\n")
        if self._console.is_terminal:
            self._console.print(Text(self._prompts[self._current], style="dim"), end="", soft_wrap=True)
        self._show(self._texts[self._current])

    def _end_line(self) -> None:
        if not self._texts[self._current].endswith("\n"):
            self._show("\n")

    def _show(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
