"""What `kdjax generate` does, as one typed config."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kdjax.config.decode import AtLeast1, DecodeConfig
from kdjax.config.mesh import ONE_DEVICE, MeshConfig
from kdjax.config.model import DrafterOverrides
from kdjax.errors import KdjaxError


class ModelSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoint folders in the Hugging Face layout, or `bundled:NAME` for a model shipped inside the package.

    `drafter` None means the drafter bundled with the target; a target from a folder has none. `allow_mismatch` lets a
    drafter run with another target than the one it was trained for; `drafter_overrides` changes how it attends.
    """

    target: str = "bundled:nano"
    drafter: str | None = None
    allow_mismatch: bool = False
    drafter_overrides: DrafterOverrides = DrafterOverrides()


class PromptSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`chat` renders the prompt as a user turn of the chat template; otherwise the text is continued as it stands.

    `system` and `thinking` are for chat only.

    Raises:
        KdjaxError: one of them without `chat`.
    """

    chat: bool = False
    system: str | None = None
    thinking: bool = False

    def __post_init__(self) -> None:
        without_effect = {"thinking = true": self.thinking, f"system = {self.system!r}": self.system is not None}
        for setting, is_set in without_effect.items():
            if is_set and not self.chat:
                raise KdjaxError(f"prompt.{setting} is for chat only: set prompt.chat = true too, or leave it out")


class DecodeSection(DecodeConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`DecodeConfig`, and what every prompt asks for: `max_new_tokens` at most, drawn with noise of `seed`.

    Up to `slots` prompts are decoded at once; further ones wait for a free slot.
    """

    max_new_tokens: AtLeast1 = 128
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    slots: AtLeast1 = 8


class RuntimeSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numerics and compilation. Equality of all decoding modes is promised for float32.

    What is absent is chosen by the platform that JAX finds: float32, "xla" and "dequantized" on a CPU; bfloat16,
    "triton" and "packed" on an NVIDIA GPU, where `compute_dtype` "float32" asks for all that a CPU would have.

    `expert_weights` "packed" keeps INT4 experts packed up to the kernel; "dequantized" expands them once, at load.
    `layout` "fused" rearranges the weights at load for small float32 models on CPU; "checkpoint" leaves them
    alone; absent, it is fused on one device with float32 and dequantized experts.
    `compilation_cache` keeps compiled programs in the user's cache folder, so that a second start is fast.
    """

    compute_dtype: Literal["float32", "bfloat16"] | None = None
    cache_dtype: Literal["float32", "bfloat16"] | None = None
    backend: Literal["xla", "triton", "interpret"] | None = None
    expert_weights: Literal["packed", "dequantized"] | None = None
    layout: Literal["fused", "checkpoint"] | None = None
    compilation_cache: bool = True

    @property
    def left_open(self) -> list[str]:
        """The keys that are absent, in their order."""
        return [name for name in RuntimeSection.__struct_fields__ if getattr(self, name) is None]


class GenerateConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `configs/generate/*.toml`: a table for each of the sections, all of them optional."""

    model: ModelSection = ModelSection()
    prompt: PromptSection = PromptSection()
    decode: DecodeSection = DecodeSection()
    runtime: RuntimeSection = RuntimeSection()
    mesh: MeshConfig = ONE_DEVICE
