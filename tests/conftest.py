"""Strict numerics and shape checks for the whole suite."""

import gc
import os

from tests import xla

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# threads of BLAS spin while they wait: on a shared machine small NumPy products become fifty times slower
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", xla.flags(devices=8))

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hook = install_import_hook(["kdjax", "pallas_kernels"], "beartype.beartype")


def pytest_xdist_auto_num_workers(config):
    """Compilation keeps one core busy, so files run side by side; not on a GPU, whose memory one process takes."""
    one_file = len(config.args) == 1 and ".py" in config.args[0]
    alone = one_file or os.environ["JAX_PLATFORMS"] != "cpu"
    return 0 if alone else min(os.cpu_count() or 1, 4)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Every compiled program keeps memory mapped; a process may have 65,530 mappings, and LLVM crashes at the limit."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def oracle():
    from tests.oracles import load

    return load
