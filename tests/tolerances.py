"""Every numeric tolerance of the suite, with the reason for its size.

Policy. Integers (tokens, trees, routing sets, codes, packed words) are compared exactly, never with a tolerance.
A tolerance is about ten times the disagreement of two independent correct implementations, so that another summation
order passes and a wrong formula does not; the observed disagreement stands beside the number. A result that misses its
tolerance is explained, not accommodated: a test may tighten a tolerance but never widen it on the spot.
All are for float32 (or better) arithmetic with float32 matmuls.
"""

from typing import Any, NamedTuple

import numpy as np


class Tolerance(NamedTuple):
    atol: float
    rtol: float = 0.0

    def check(self, actual: Any, expected: Any, what: str = "") -> None:
        np.testing.assert_allclose(actual, expected, rtol=self.rtol, atol=self.atol, err_msg=what)


# transformers float32 and an independent float64 implementation differ by up to 5e-5
TARGET_LOGITS = Tolerance(5e-4, 1e-4)
TARGET_RESIDUAL = Tolerance(5e-4, 1e-4)
TARGET_CACHE = Tolerance(5e-4, 1e-4)
ROUTER_LOGITS = Tolerance(5e-4, 1e-4)
ROUTER_WEIGHTS = Tolerance(1e-4)

# from given router logits only a sigmoid and a division remain; atol covers sigmoids that flush to zero
GATE_WEIGHTS = Tolerance(1e-12, 5e-6)

# z-lab float32 and an independent float64 implementation differ by up to 2e-5
DRAFTER = Tolerance(2e-4, 1e-4)

# speculative rounds chain prefill, verify and commit, hence the target's tolerance for draft logits too
ROUND_LOGITS = Tolerance(5e-4)

# float32 pow differs by 1 to 2 ulp between libraries
INVERSE_FREQUENCY = Tolerance(0.0, 5e-7)
# nats per token between float64 and float32 of a random model; up to 1e-9 observed (kernels), bfloat16 is above 1e-6
FLOAT32_KL = 1e-8
# given the same inverse frequencies, only the library's float32 cos and sin differ
COS_SIN = Tolerance(1e-6)
ROTATED = Tolerance(1e-5)

# float32 sum of 160 products
PACKED_MATMUL = Tolerance(0.0, 1e-5)

# float64 sums of at most 7 terms, added in another order
TREE_SCORE = Tolerance(1e-12, 1e-12)

# materialised against absorbed attention in float64: reassociated products of width at most 512
ABSORBED_FLOAT64 = Tolerance(1e-9, 1e-9)


def cos_sin_own_frequencies(positions: np.ndarray, inverse_frequencies: np.ndarray) -> np.ndarray:
    """Allowed error [P, half] of cos and sin where the angle uses our own inverse frequency: 1 ulp of it, times p."""
    return 1e-6 + 4e-7 * positions[:, None] * inverse_frequencies


# float32 sums of a few hundred products of order 1, in another order and with another split of the softmax
EXPERTS_FLOAT32 = Tolerance(2e-5, 2e-5)
ATTENTION_FLOAT32 = Tolerance(2e-6, 2e-5)
# bfloat16 keeps 8 significant bits; activations, products and the result are each rounded once (observed: 4e-3)
EXPERTS_BFLOAT16 = Tolerance(4e-2, 4e-2)
# norm of a token's error over that of its output, weights INT4, all else bfloat16 (observed: 4e-3)
RELATIVE_INT4 = 1e-2
# norm of the error of a two-layer bfloat16 model's hidden states over their own (observed: 1.8e-2)
MODEL_RELATIVE_BFLOAT16 = 3e-2
ATTENTION_BFLOAT16 = Tolerance(2e-2, 2e-2)
# the same float32 model computed with other shapes (batch, tree width, chunking): 1e-6 observed on values near 1
SAME_MODEL_FLOAT32 = Tolerance(3e-5, 3e-5)
# the trained 8-layer model, logits up to 40 in float32: 7e-5 observed between two float32 forms, same to float64
SHIPPED_LOGITS = Tolerance(5e-4, 2e-5)
