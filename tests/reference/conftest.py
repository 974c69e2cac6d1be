import functools

import pytest

from kdjax.reference import checkpoint
from tests import oracles


@pytest.fixture(scope="session")
def target():
    """(config, params) of a target case, read once per session and rounding."""

    @functools.cache
    def read(name, rounding="bfloat16"):
        return checkpoint.read_target(oracles.load(name).checkpoint, rounding)

    return read


@pytest.fixture(scope="session")
def drafter():
    @functools.cache
    def read(name):
        return checkpoint.read_drafter(oracles.load(name).checkpoint)

    return read
