"""Strict numerics and shape checks for the whole suite."""

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# threads of BLAS spin while they wait: on a shared machine small NumPy products become fifty times slower
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# most of the suite's time is compilation of programs that run once: unoptimised code is compiled twice as fast
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hook = install_import_hook(["kdjax", "pallas_kernels"], "beartype.beartype")


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
