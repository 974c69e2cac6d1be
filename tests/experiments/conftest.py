import functools

import jax
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def usual_promotion():
    """The strict promotion of this suite is a rule for the library; the training code broadcasts freely."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def random_params():
    """Weights of the size that `init` gives them, drawn by NumPy: compiling the real draws takes half a minute."""

    def draw(init, config, seed=0):
        shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
        rng = np.random.default_rng(seed)

        def leaf(s):
            if len(s.shape) == 1:
                return np.ones(s.shape, np.float32)
            return (rng.normal(size=s.shape) * s.shape[-1] ** -0.5).astype(np.float32)

        return jax.tree.map(leaf, shapes)

    return draw
