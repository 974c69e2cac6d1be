"""Chat template: messages -> the text of a Kimi K2.6 conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kdjax.errors import KdjaxError


class FunctionCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`arguments` is a JSON text, or an object that the template writes as JSON."""

    arguments: str | dict[str, Any]
    name: str | None = None


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`id` is Kimi's `functions.NAME:IDX`. Arguments may stand directly or, as in the OpenAI API, under `function`."""

    id: str
    arguments: str | dict[str, Any] | None = None
    function: FunctionCall | None = None
    type: str = "function"

    def __post_init__(self) -> None:
        if (self.arguments is None) == (self.function is None):
            raise ValueError(f"tool call {self.id!r} needs either arguments or function.arguments")


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn. `reasoning` and `reasoning_content` are two names of the same thing; templates see the latter."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if self.role == "tool" and not (self.name and self.tool_call_id):
            raise ValueError("a tool message needs name and tool_call_id")
        if self.role != "assistant" and self.content is None:
            raise ValueError(f"a {self.role} message needs content")
        self.reasoning_content, self.reasoning = self.reasoning_content or self.reasoning, None


class ChatTemplate:
    """A Jinja template, run in a sandbox: checkpoints bring their own, and that is code from somebody else.

    The environment is that of Hugging Face chat templates (`raise_exception`, plain `tojson`, trimmed blocks).
    """

    def __init__(self, source: str, name: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = _json
        self.name = name
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise KdjaxError(f"{name}:{error.lineno}: {error.message}") from error

    @classmethod
    def default(cls) -> ChatTemplate:
        """The template that ships with kdjax."""
        file = resources.files("kdjax.tokenizer") / "chat_template.jinja"
        return cls(file.read_text(encoding="utf-8"), file.name)

    @classmethod
    def from_file(cls, path: Path) -> ChatTemplate:
        try:
            return cls(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise KdjaxError(f"{path}: cannot read the chat template ({error}): download it again") from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        thinking: bool = True,
        preserve_thinking: bool = False,
        add_generation_prompt: bool = True,
        tool_declaration: str | None = None,
    ) -> str:
        """The text of a conversation, ending with one assistant header when `add_generation_prompt`.

        Args:
          messages: dicts with the fields of `Message`.
          thinking: the header opens `<think>`; otherwise `<think></think>` (instant mode).
          preserve_thinking: keep the reasoning of earlier answers (K2.6; default off).
          tool_declaration: text of the `tool_declare` turn (TypeScript signatures), put first.

        Raises KdjaxError for an empty list, an unknown role or field, or a template error.
        """
        if not messages:
            raise KdjaxError("messages is empty: give at least one user message")
        try:
            turns = msgspec.convert(list(messages), list[Message])
        except msgspec.ValidationError as error:
            raise KdjaxError(f"messages: {error}") from error
        try:
            return self._template.render(
                messages=cast(list[dict[str, Any]], msgspec.to_builtins(turns)),
                thinking=thinking,
                preserve_thinking=preserve_thinking,
                add_generation_prompt=add_generation_prompt,
                tools_ts_str=tool_declaration,
            )
        except jinja2.TemplateError as error:
            raise KdjaxError(f"{self.name}: {error}") from error
        except Exception as error:  # the template is a program of the checkpoint: it may fail in any way
            raise KdjaxError(f"{self.name}: the template failed on these messages ({error})") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
