"""The shipped model, read by two independent loaders, and a text that both forms of the networks read."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdjax.bundled import bundled_model
from kdjax.checkpoint import load_drafter, load_target
from kdjax.model.runtime import CPU_EXACT
from kdjax.reference.checkpoint import read_drafter, read_target
from kdjax.tokenizer import Tokenizer

NANO = bundled_model("nano")
TEXT = (pathlib.Path(__file__).parents[2] / "LICENSE").read_text()


@pytest.fixture(scope="session")
def target():
    return load_target(NANO / "target", CPU_EXACT)


@pytest.fixture(scope="session")
def drafter(target):
    return load_drafter(NANO / "drafter", CPU_EXACT, target.config)


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.from_checkpoint(NANO / "target")


@pytest.fixture(scope="session")
def reference_target():
    """float64 params, from the loader of `kdjax.reference`."""
    return read_target(NANO / "target")[1]


@pytest.fixture(scope="session")
def reference_drafter():
    return read_drafter(NANO / "drafter")[1]


@pytest.fixture(scope="session")
def tokens(tokenizer):
    """Longer than the drafter's sliding window."""
    return np.asarray(tokenizer.encode_prompt(TEXT)[:320], np.int32)


def float32(params):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
