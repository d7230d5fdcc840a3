import numpy as np
import pytest

from flatout.errors import DataError
from flatout.measure.curves import compare_curves


def test_what_is_nearly_zero_is_judged_by_the_scale_of_the_curve():
    assert compare_curves([100.0, 0.0], [100.0, 1e-6]).max_rel == pytest.approx(1e-6 / 0.1)


def test_curves_tell_the_largest_difference_and_the_first():
    a = [2.0, 1.0, 0.5, 0.25]
    b = [2.0, 1.001, 0.55, 0.25]
    found = compare_curves(a, np.array(b, dtype=np.float32))
    assert (found.first, found.step) == (1, 2)
    assert found.max_rel == pytest.approx(0.05 / 0.55, rel=1e-5)
    assert found.words == "differs by up to 9.1e-02 at step 2, first at 1"


def test_equal_curves_with_nan():
    found = compare_curves([1.0, np.nan], [1.0, np.nan])
    assert (found.max_rel, found.step, found.first) == (0.0, None, None)
    assert found.words == "equal"
    assert compare_curves([1.0, 2.0], [1.0, np.nan]).max_rel == np.inf


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([[1.0]], [[1.0]])])
def test_curves_must_have_the_same_steps(a, b):
    with pytest.raises(DataError, match="same steps"):
        compare_curves(a, b)
