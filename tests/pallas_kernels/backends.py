"""The backends a suite is run with; the compiled kernels need a GPU."""

import pytest

# the condition is a string so that it is evaluated, and JAX started, only when such a test is to run
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "__import__('jax').default_backend() != 'gpu'", reason="needs a CUDA device: run with JAX_PLATFORMS=cuda -m gpu"
    ),
]
BACKENDS = ["xla", "interpret", pytest.param("triton", marks=needs_gpu)]
