import json
import pathlib

import pytest

from kdjax.errors import KdjaxError
from kdjax.tokenizer import Tokenizer
from kdjax.tokenizer.chat import ChatTemplate
from tests.oracles import find

pytestmark = pytest.mark.newest
SMALL = pathlib.Path(__file__).parents[1] / "data" / "tiktoken_4096.model"
HEADER = "<|im_assistant|>assistant<|im_middle|>"
TALK = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2", "reasoning_content": "easy"},
    {"role": "user", "content": "and 2+2?"},
]


@pytest.fixture(scope="module")
def template():
    return ChatTemplate.default()


def test_golden_conversations():
    kimi = Tokenizer.from_file(find("tokenizer") / "tiktoken.model")
    for chat in json.loads((find("tokenizer_chat") / "expected.json").read_text())["chats"]:
        assert kimi.template.render(chat["messages"], **chat["options"]) == chat["text"], chat["name"]
        assert kimi.encode_chat(chat["messages"], **chat["options"]) == chat["ids"], chat["name"]


def test_two_turns_have_exactly_one_trailing_assistant_header(template):
    text = template.render(TALK)
    assert text.endswith(f"and 2+2?<|im_end|>{HEADER}<think>")
    assert text.count(HEADER) == 2


def test_thinking_and_instant(template):
    assert template.render(TALK, thinking=False).endswith(f"{HEADER}<think></think>")
    assert "easy" not in template.render(TALK)
    assert "<think>easy</think>2" in template.render(TALK, preserve_thinking=True)
    assert template.render(TALK[:1], add_generation_prompt=False) == "<|im_user|>user<|im_middle|>1+1?<|im_end|>"


def test_reasoning_of_the_tool_round_under_way_is_kept(template):
    call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": {"x": "é<"}}}
    messages = [
        *TALK,
        {"role": "assistant", "reasoning": "use add", "tool_calls": [call]},
        {"role": "tool", "name": "add", "tool_call_id": "functions.add:0", "content": "4"},
    ]
    text = template.render(messages, tool_declaration="namespace functions {}")
    assert text.startswith("<|im_system|>tool_declare<|im_middle|>namespace functions {}<|im_end|><|im_user|>")
    assert "easy" not in text and "<think>use add</think>" in text
    assert '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"x": "é<"}<|tool_call_end|>' in text
    assert "<|im_system|>add<|im_middle|>## Return of functions.add:0\n4<|im_end|>" in text


def test_equal_answers_are_told_apart(template):
    same = {"role": "assistant", "content": "ok", "reasoning": "hm"}
    assert "hm" not in template.render([*TALK[:1], same, *TALK[:1], same])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is empty"),
        ([{"role": "robot", "content": "x"}], "'robot'"),
        ([{"role": "user", "content": "x", "colour": "red"}], "colour"),
        ([{"role": "user"}], "a user message needs content"),
        ([{"role": "tool", "content": "x"}], "needs name and tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"id": "f:0"}]}], "needs either arguments or function.arguments"),
    ],
)
def test_malformed_conversations_are_one_line_errors(template, messages, said):
    with pytest.raises(KdjaxError, match=said) as caught:
        template.render(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["{{ 1 + 'a' }}", "{{ 1 / 0 }}"])
def test_a_template_that_fails_in_any_way_is_named(source):
    with pytest.raises(KdjaxError, match="^custom: the template failed on these messages"):
        ChatTemplate(source, "custom").render(TALK)


def test_a_template_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "chat.jinja").write_bytes(b"\xff")
    with pytest.raises(KdjaxError, match=r"chat.jinja: cannot read the chat template .*: download it again"):
        ChatTemplate.from_file(tmp_path / "chat.jinja")


def test_templates_run_in_a_sandbox():
    with pytest.raises(KdjaxError, match="unsafe"):
        ChatTemplate("{{ ''.__class__.__mro__ }}", "evil").render(TALK)
    with pytest.raises(KdjaxError, match=r"^broken:1:"):
        ChatTemplate("{% if %}", "broken")
    with pytest.raises(KdjaxError, match="custom: no system turn"):
        ChatTemplate("{{ raise_exception('no system turn') }}", "custom").render(TALK)
