import pytest
from devices_fakes import FakeGpu, FakeNvml
from hypothesis import given
from hypothesis import strategies as st

from flatout.devices.gpus import read_nvml
from flatout.devices.visible import cuda_devices, order_is_certain

EQUAL = read_nvml(FakeNvml(*(FakeGpu(uuid=f"GPU-{letter}00") for letter in "abcd"))).gpus
MIXED = read_nvml(
    FakeNvml(
        FakeGpu(uuid="GPU-slow", name="T4", cores=2560, clock=1590),
        FakeGpu(uuid="GPU-fast", name="H100", cores=16896, clock=1980),
        FakeGpu(uuid="GPU-slow2", name="T4", cores=2560, clock=1590),
    )
).gpus


def shown(gpus, visible=None, **environment):
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    return [device.uuid.split("-")[1] for device in cuda_devices(gpus, environment)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "a00 b00 c00 d00"),
        ("", ""),
        ("-1", ""),
        ("2", "c00"),
        ("3,0", "d00 a00"),
        (" 3 , 0 ", "d00 a00"),
        ("0,-1,2", "a00"),
        ("1,9,2", "b00"),
        ("1,x,2", "b00"),
        ("1,,2", "b00"),
        ("NoDevFiles", ""),
        ("1gpu2,2ampere", "b00 c00"),
        ("+1", "b00"),
        ("1,1", ""),
        ("GPU-c00,GPU-a00", "c00 a00"),
        ("GPU-c,GPU-a", "c00 a00"),
        ("GPU-c00,GPU-x,GPU-a00", "c00"),
        ("GPU-c00,1", "c00"),
        ("GPU-", ""),
        ("GPU-b00,GPU-b", ""),
        ("1,GPU-a00", "b00"),
    ],
)
def test_cuda_visible_devices(visible, expected) -> None:
    assert " ".join(shown(EQUAL, visible)) == expected


def test_the_default_order_puts_the_fastest_first_and_keeps_the_bus_order_of_equals() -> None:
    assert shown(MIXED) == ["fast", "slow", "slow2"]
    assert shown(MIXED, "1") == ["slow"]
    assert shown(MIXED, CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["slow", "fast", "slow2"]
    assert shown(MIXED, "1", CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["fast"]


def test_the_order_is_certain_by_bus_or_among_equals() -> None:
    assert order_is_certain(EQUAL, {})
    assert order_is_certain((), {})
    assert not order_is_certain(MIXED, {})
    assert not order_is_certain(MIXED, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert order_is_certain(MIXED, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})


def test_a_slice_counts_as_the_first_gpu() -> None:
    assert shown(EQUAL, "MIG-7d3") == ["a00"]


@given(st.text(alphabet="0123456789,-+ GPUMIGabc", max_size=20))
def test_any_text_shows_distinct_devices_that_are_there(visible) -> None:
    found = shown(EQUAL, visible)
    assert len(set(found)) == len(found)
    assert set(found) <= {"a00", "b00", "c00", "d00"}


@given(st.lists(st.integers(-2, 6), max_size=6))
def test_numbers_are_read_as_torch_reads_them(numbers) -> None:
    # torch.cuda._parse_visible_devices, restated: stop at a negative number, nothing if repeated.
    kept = []
    for number in numbers:
        if number in kept:
            kept = []
            break
        if not 0 <= number < len(EQUAL):
            break
        kept.append(number)
    expected = [EQUAL[number].uuid.split("-")[1] for number in kept]
    assert shown(EQUAL, ",".join(map(str, numbers))) == expected
