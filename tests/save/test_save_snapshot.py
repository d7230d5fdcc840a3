import pytest
import torch

from flatout.save.snapshot import Snapshot


def test_a_copy_does_not_change_with_the_model() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    copied = Snapshot().copy({"w": weight})
    before = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(copied["w"], before)
    assert not copied["w"].requires_grad


def test_buffers_are_used_again_unless_the_tensor_is_another() -> None:
    snapshot = Snapshot()
    first = snapshot.copy({"a": torch.zeros(3), "b": torch.zeros(3)})
    second = snapshot.copy({"a": torch.ones(3), "b": torch.ones(4)})
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert torch.equal(second["a"], torch.ones(3))
    assert torch.equal(second["b"], torch.ones(4))
    third = snapshot.copy({"a": torch.ones(3, dtype=torch.int32)})
    assert third["a"].dtype == torch.int32


def test_tied_tensors_share_a_copy_and_stay_apart_when_untied() -> None:
    snapshot = Snapshot()
    tied = torch.ones(3)
    copied = snapshot.copy({"a": tied, "b": tied})
    assert copied["a"] is copied["b"]
    apart = snapshot.copy({"a": torch.zeros(3), "b": tied})
    assert torch.equal(apart["a"], torch.zeros(3))
    assert torch.equal(apart["b"], torch.ones(3))


def test_layouts_and_inference_mode() -> None:
    snapshot = Snapshot()
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with torch.inference_mode():
        snapshot.copy({"x": images})
        inside = images * 2
    copied = snapshot.copy({"x": inside})
    assert torch.equal(copied["x"], inside)
    assert copied["x"].stride() == images.stride()
    expanded = torch.randn(1, 3).expand(4, 3)
    assert torch.equal(snapshot.copy({"x": expanded})["x"], expanded)


@pytest.mark.gpu
def test_from_the_gpu_values_are_those_at_the_call() -> None:
    snapshot = Snapshot()
    weight = torch.randn(1 << 22, device="cuda")
    for _ in range(3):
        expected = weight.cpu()
        copied = snapshot.copy({"w": weight})
        weight.mul_(2)
        assert torch.equal(copied["w"], expected)
        assert copied["w"].is_pinned()
    assert copied["w"].device.type == "cpu"
