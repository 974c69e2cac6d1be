"""A tiny random model in the layout of the real ones: its text is noise, but every step around it is real."""

import pathlib
import signal

import jax
import msgspec
import pytest
from jax.experimental.compilation_cache import compilation_cache

from kdjax.checkpoint import save_drafter, save_target
from tests.checkpoint.random_models import DRAFTER, TARGET, random_drafter, random_target

SMALL = pathlib.Path(__file__).parents[1] / "data" / "tiktoken_4096.model"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> pathlib.Path:
    """A folder with `target`, `drafter`, and `stranger`: a drafter made for another hidden size."""
    folder = tmp_path_factory.mktemp("tiny")
    target = msgspec.structs.replace(
        TARGET,
        num_hidden_layers=2,
        vocab_size=4096,
        max_position_embeddings=2048,
        bos_token_id=3840,
        eos_token_ids=(3841, 3842),
        pad_token_id=4095,
    )
    drafter = msgspec.structs.replace(
        DRAFTER,
        num_hidden_layers=1,
        layer_types=("full_attention",),
        sliding_window=None,
        num_target_layers=2,
        target_layer_ids=(0, 1),
        vocab_size=4096,
        mask_token_id=4094,
    )
    stranger = msgspec.structs.replace(drafter, hidden_size=32)
    save_target(folder / "target", target, random_target(target))
    (folder / "target" / "tiktoken.model").write_bytes(SMALL.read_bytes())
    save_drafter(folder / "drafter", drafter, random_drafter(drafter))
    save_drafter(folder / "stranger", stranger, random_drafter(stranger))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The compilation cache of this module's runs, and of no other test: JAX looks for it once per process."""
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    compilation_cache.reset_cache()
    yield tmp_path_factory.mktemp("cache")
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def foreground():
    """SIGINT as a command in the foreground gets it: a shell starts background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
