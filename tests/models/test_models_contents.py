"""What tensors hold is known though torch does not count how it was written."""

import pytest
import torch

from flatout.models.frozen.contents import Contents, contents_of


def by_data(tensor):
    tensor.data.mul_(3)


def by_an_array(tensor):
    array = tensor.detach().numpy()
    array[(0,) * array.ndim] += 1


def as_counted(tensor):
    with torch.no_grad():
        tensor.add_(1)


@pytest.mark.parametrize("change", [by_data, by_an_array, as_counted])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4),
        torch.ones(3, 4, dtype=torch.float64),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(20, dtype=torch.uint8)[3:8],
        torch.ones(()),
        torch.nn.Parameter(torch.ones(2, 2)),
    ],
    ids=lambda value: f"{str(value.dtype)[6:]} {value.dim()}d",
)
def test_a_change_is_noticed_however_it_is_made(tensor, change):
    other = torch.zeros(5, dtype=torch.bfloat16)
    contents = Contents([other, tensor])
    assert contents.are_same()
    before = tensor.detach().clone()
    change(tensor)
    assert not contents.are_same()
    tensor.data.copy_(before)
    assert contents.are_same()


def test_what_holds_nothing_is_the_same():
    assert contents_of([torch.empty(0, 3)]) == [0]
    assert contents_of([]) == []


def test_looking_takes_a_hundredth_of_the_time():
    now = [100.0]

    def clock():
        now[0] += 0.01  # between two readings
        return now[0]

    tensor = torch.ones(3)
    contents = Contents([tensor], clock)
    assert contents.seem_same()
    tensor.data.add_(1)
    looks = 0
    while contents.seem_same():
        looks += 1
    # It took 0.01 s, so 1 s passes, of which each question takes 0.01.
    assert 95 <= looks <= 101
