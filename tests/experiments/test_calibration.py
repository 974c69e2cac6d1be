import numpy as np
import pytest

from experiments import calibration


def test_calibration_error_is_the_mean_distance_of_the_bins():
    bins = np.array([[10.0, 1.0, 3.0], [30.0, 27.0, 27.0], [0.0, 0.0, 0.0]])  # drafts, sum of probabilities, accepted
    assert calibration.calibration_error(bins) == pytest.approx(2 / 40)
