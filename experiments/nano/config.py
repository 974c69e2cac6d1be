"""Configuration of the training runs that make the small bundled model (`configs/experiments/nano.toml`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kdjax.config.generate import ModelSection
from kdjax.config.model import DrafterConfig, ModelConfig
from kdjax.config.pair import ModelPair
from kdjax.errors import KdjaxError

Attention = Literal["xla", "cudnn"]
"""Implementations of `jax.nn.dot_product_attention`; cudnn needs a GPU."""


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A folder with `train/` and `heldout/` of `*.txt` or `*.txt.gz`, documents separated by `<|endoftext|>`.

    `weights` maps a file's stem (or a prefix of it, longest match first) to its share of the training tokens;
    the share of a prefix is spread over its files by size. A file without a match is not trained on.
    """

    corpus: str
    tokenizer: str
    weights: dict[str, float]


class Phase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a run: lasts until `until` (0..1 of the run), `batch` windows of `seq_len` tokens a step."""

    until: float
    seq_len: int
    batch: int
    int4: bool = False


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Muon for matrices, Adam for embeddings, head, norms and router; warm-up, constant, linear decay to zero."""

    muon_lr: float = 0.006
    adam_lr: float = 0.003
    weight_decay: float = 0.1
    warmup: float = 0.02
    decay_from: float = 0.4
    clip_norm: float = 1.0


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run. Give `minutes` (wall clock, compilation included) or `steps`; progress is their fraction."""

    phases: tuple[Phase, ...]
    minutes: float | None = None
    steps: int | None = None
    seed: int = 0
    optimizer: OptimizerConfig = OptimizerConfig()
    log_every: int = 20
    evaluate_every_seconds: float = 60.0
    attention: Attention = "xla"

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise KdjaxError(f"minutes={self.minutes} and steps={self.steps}: give exactly one of them")
        if not self.phases or self.phases[-1].until != 1.0:
            raise KdjaxError("the last training phase must have until = 1.0")


class SelfDataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text that the target writes itself: prompts of `prompt_len` training tokens, continued to `seq_len`.

    `greedy_share` of the rows is decoded at temperature 0, the rest at a temperature drawn from `temperatures`.
    Rows whose last 64 tokens loop are kept with probability `keep_loops`.
    """

    rows: int
    batch: int
    prompt_len: int = 64
    seq_len: int = 512
    greedy_share: float = 0.6
    temperatures: tuple[float, float] = (0.6, 1.0)
    keep_loops: float = 0.15
    seed: int = 1


class DraftTrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Drafter training: `anchors` blocks per 512 tokens; loss weight exp(-(k-1)/gamma) for slot k (DFlash).

    What is learnt is the target's distribution at `teacher_temperature`: below 1, a drafter for colder decoding, whose
    probabilities are those of greedy text rather than of sampled text. `start` is a drafter of the same shape whose
    weights to begin with (a checkpoint folder or bundled:NAME); without it they are random.
    """

    train: TrainConfig
    anchors: int = 64
    gamma: float = 4.0
    self_share: float = 0.6
    teacher_temperature: Annotated[float, Meta(gt=0)] = 1.0
    start: str | None = None


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way of decoding whose acceptance is measured."""

    mode: Literal["chain", "tree"]
    budget: int
    temperature: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.budget}-T{self.temperature:g}"


class EvaluateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is measured on the held-out text of `data.corpus`: bits per byte, and acceptance in each of `cells`.

    `prompts` runs of `prompt_len` tokens per domain are continued by up to `new_tokens`, `slots` at once; prompt i
    draws its noise with seed `seed` + i. `stride` is that of the rolling windows.
    """

    model: ModelSection = ModelSection()
    cells: tuple[Cell, ...]
    prompts: int = 24
    prompt_len: int = 64
    new_tokens: int = 192
    slots: int = 8
    seed: int = 0
    stride: int = 1024


class NanoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that `python -m experiments.nano` needs."""

    data: DataConfig
    target: ModelConfig
    drafter: DrafterConfig
    train_target: TrainConfig
    self_data: SelfDataConfig
    train_drafter: DraftTrainConfig
    evaluate: EvaluateConfig

    def __post_init__(self) -> None:
        ModelPair(target=self.target, drafter=self.drafter)  # raises where they do not fit
        if self.target.experts_int4 is None:
            raise KdjaxError(
                "target.experts_int4 is not set: the last phase trains for INT4 experts, give a group_size"
            )
