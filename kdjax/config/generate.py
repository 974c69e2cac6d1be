"""What `kdjax generate` does, as one typed config."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

AtLeast0 = Annotated[int, Meta(ge=0)]
AtLeast1 = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class ModelSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoint folders in the Hugging Face layout, or `bundled:NAME` for a model shipped inside the package.

    `drafter` None means the drafter bundled with the target; a target from a folder has none.
    """

    target: str = "bundled:nano"
    drafter: str | None = None


class PromptSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`chat` renders the prompt as a user turn of the chat template; otherwise the text is continued as it stands."""

    chat: bool = False
    system: str | None = None
    thinking: bool = False


class DecodeSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen.

    `budget` counts tree nodes without the root; 0 is autoregressive decoding. `temperature` 0 is greedy. `top_k` 0,
    `top_p` 1 and `min_p` 0 switch the filter off. `rounds_per_call` is the number of verify rounds between two looks
    of the host: smaller streams more smoothly, larger wastes less. `prefill_chunk` counts prompt tokens per forward.
    Up to `slots` prompts are decoded at once; further ones wait for a free slot.
    """

    mode: Literal["tree", "chain", "autoregressive"] = "tree"
    budget: AtLeast0 = 15
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: AtLeast0 = 0
    min_p: Fraction = 0.0
    max_new_tokens: AtLeast1 = 128
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    rounds_per_call: AtLeast1 = 16
    prefill_chunk: AtLeast1 = 64
    slots: AtLeast1 = 8


class RuntimeSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numerics and compilation. Equality of all decoding modes is promised for float32.

    `expert_weights` "packed" keeps INT4 experts packed up to the kernel; "dequantized" expands them once, at load.
    `compilation_cache` keeps compiled programs in the user's cache folder, so that a second start is fast.
    """

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    cache_dtype: Literal["float32", "bfloat16"] = "float32"
    backend: Literal["xla"] = "xla"
    expert_weights: Literal["packed", "dequantized"] = "dequantized"
    compilation_cache: bool = True


class GenerateConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelSection = ModelSection()
    prompt: PromptSection = PromptSection()
    decode: DecodeSection = DecodeSection()
    runtime: RuntimeSection = RuntimeSection()
