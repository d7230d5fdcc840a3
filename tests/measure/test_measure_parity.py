import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flatout.errors import DataError, ModelError
from flatout.measure.parity import Difference, compare_curves, compare_tensors

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 5)])
def test_a_copy_is_bit_identical_and_a_change_is_not(dtype, shape):
    values = torch.arange(1, 1 + int(np.prod(shape))).reshape(shape).to(dtype)
    same = compare_tensors({"w": values}, {"w": values.clone()})
    assert same == Difference(True, 0.0, 0.0, None)
    assert same.words == "bit-identical"
    if values.numel():
        changed = values.clone()
        changed.view(-1)[-1] = 0
        found = compare_tensors({"w": values}, {"w": changed})
        assert not found.bitwise
        assert found.worst == "w"
        assert found.max_abs > 0


arrays = hnp.arrays(np.float32, st.integers(1, 20), elements=st.floats(width=32))


@settings(deadline=None)
@given(arrays)
def test_any_array_equals_itself_nan_and_infinity_included(values):
    assert compare_tensors({"w": values}, {"w": torch.from_numpy(values.copy())}).bitwise


@settings(deadline=None)
@given(arrays, arrays)
def test_differences_are_symmetric_and_never_nan(a, b):
    size = min(len(a), len(b))
    one, other = {"w": a[:size]}, {"w": b[:size]}
    found = compare_tensors(one, other)
    assert found == compare_tensors(other, one)
    assert found.max_abs >= 0
    assert found.max_rel >= 0
    assert found.bitwise == (a[:size].tobytes() == b[:size].tobytes())


def test_measures_follow_their_definition():
    a = {"w": np.array([100.0, 1.0, 0.001]), "v": np.array([5.0])}
    b = {"w": np.array([100.0, 1.0, 0.002]), "v": np.array([5.1])}
    found = compare_tensors(a, b)
    # The element near 0 is judged against a thousandth of the largest, 100.
    assert found.worst == "v"
    assert found.max_rel == pytest.approx(0.1 / 5.1)
    assert found.max_abs == pytest.approx(0.1)
    strict = compare_tensors(a, b, scale_floor=0)
    assert strict.worst == "w"
    assert strict.max_rel == pytest.approx(0.5)
    assert found.words == "differs by up to 2.0e-02 (v), 1.0e-01 absolute"


def test_bf16_rounding_is_measured_in_full_precision():
    a = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    b = torch.tensor([1.0078125, 2.0], dtype=torch.bfloat16)
    found = compare_tensors({"w": a}, {"w": b})
    assert found.max_abs == 0.0078125
    assert found.max_rel == pytest.approx(0.0078125 / 1.0078125)


def test_nan_against_a_number_is_infinitely_far():
    a, b = {"w": np.array([1.0, np.nan])}, {"w": np.array([1.0, 3.0])}
    found = compare_tensors(a, b)
    assert (found.max_abs, found.max_rel) == (np.inf, np.inf)
    assert compare_tensors({"w": np.array([np.inf])}, {"w": np.array([-np.inf])}).max_abs == np.inf


def test_signed_zeros_and_nan_payloads_differ_in_bits_alone():
    payload = np.array([0x7FC00000, 0x7FC00001], dtype=np.uint32).view(np.float32)
    for a, b in (([0.0], [-0.0]), (payload[:1], payload[1:])):
        found = compare_tensors({"w": np.float32(a)}, {"w": np.float32(b)})
        assert found == Difference(False, 0.0, 0.0, "w")


def test_neighboring_large_integers_differ():
    a, b = torch.tensor([2**62]), torch.tensor([2**62 + 1])
    found = compare_tensors({"step": a}, {"step": b})
    assert not found.bitwise
    assert found.max_abs == 1


def test_layout_and_kind_do_not_matter():
    weight = torch.arange(120.0).reshape(2, 3, 4, 5)
    a = {
        "conv": weight.contiguous(memory_format=torch.channels_last),
        "embedding": torch.eye(3).to_sparse(),
        "phase": torch.tensor([1 + 2j]).conj(),
        "grad": torch.nn.Parameter(weight),
    }
    b = {
        "grad": weight.numpy(),
        "phase": np.array([1 - 2j], dtype=np.complex64),
        "embedding": np.eye(3, dtype=np.float32),
        "conv": np.asfortranarray(weight.numpy()),
    }
    assert compare_tensors(a, b).bitwise


def test_a_difference_far_into_a_large_tensor_is_found():
    a = torch.ones(3_000_000)
    b = a.clone()
    b[2_999_999] = 1.5
    found = compare_tensors({"w": a}, {"w": b})
    assert (found.max_abs, found.max_rel) == (0.5, pytest.approx(1 / 3))


def test_different_names_are_named():
    a = {f"layer{index}": np.zeros(1) for index in range(9)}
    with pytest.raises(ModelError, match=r"layer4 and 4 more, only the second has other"):
        compare_tensors(a, {"other": np.zeros(1)})


@pytest.mark.parametrize(
    ("b", "found"),
    [
        (torch.zeros(3, 2), r"float32 \[2, 3\] and float32 \[3, 2\]"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), r"float32 \[2, 3\] and bfloat16 \[2, 3\]"),
        (np.zeros((2, 3)), r"float32 \[2, 3\] and float64 \[2, 3\]"),
        (np.array(["a"]), "array of <U1"),
        ("text", "found str"),
    ],
)
def test_different_shapes_dtypes_and_kinds_are_named(b, found):
    with pytest.raises(ModelError, match=found) as caught:
        compare_tensors({"w": torch.zeros(2, 3)}, {"w": b})
    assert caught.value.where == "w"


@pytest.mark.gpu
def test_tensors_on_a_gpu_compare_with_tensors_on_the_cpu():
    values = torch.randn(1000, dtype=torch.bfloat16)
    assert compare_tensors({"w": values.cuda()}, {"w": values}).bitwise
    found = compare_tensors({"w": values.cuda() * 2}, {"w": values})
    assert found.max_rel == pytest.approx(0.5)


def test_arrays_are_compared_without_torch():
    script = (
        "import sys, numpy as np\n"
        "from flatout.measure import compare_tensors\n"
        "assert not compare_tensors({'w': np.ones(2)}, {'w': np.zeros(2)}).bitwise\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


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
