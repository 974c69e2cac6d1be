"""The 256 reserved ids that follow the ranks of a Kimi tokenizer file."""

from __future__ import annotations

RESERVED = 256

BOS, EOS, IM_END, IM_USER, IM_ASSISTANT, IM_SYSTEM, IM_MIDDLE = 0, 1, 2, 3, 4, 10, 17
UNK, PAD = 254, 255

NAMES = {
    BOS: "[BOS]",
    EOS: "[EOS]",
    IM_END: "<|im_end|>",
    IM_USER: "<|im_user|>",
    IM_ASSISTANT: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    IM_SYSTEM: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    IM_MIDDLE: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    UNK: "[UNK]",
    PAD: "[PAD]",
}


def special_tokens(base: int) -> dict[str, int]:
    """Name -> id of the ids base .. base+255, where `base` is the number of ranks (163,584 for Kimi K2.6).

    Ids without a name of their own are called `<|reserved_token_ID|>`, as in Moonshot's tokenizer.
    """
    return {NAMES.get(k, f"<|reserved_token_{base + k}|>"): base + k for k in range(RESERVED)}
