import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.devices import find_ping_pong


@pytest.fixture
def cuda():
    """Tensors that say they are on CUDA, through torch's own operators, without values."""
    with FakeTensorMode(), torch.no_grad():
        yield "cuda:0"


def line(offset: int) -> str:
    return f"{__file__}:{sys._getframe(1).f_lineno + offset}"


def test_data_that_leaves_and_comes_back_is_found_with_both_lines(cuda) -> None:
    x = torch.empty(100, 10, device=cuda)

    def step() -> None:
        y = x * 2
        z = torch.relu(y.cpu())
        (z + 1).to(cuda)

    left, returned = line(-3), line(-2)
    (trip,) = find_ping_pong(step)
    assert trip == (cuda, left, returned, 1, 4000)
    assert trip.words == (
        f"4000 bytes left cuda:0 at {left} and came back at {returned} in one step; "
        "keep it on cuda:0"
    )


def test_repeated_trips_are_counted_and_the_largest_comes_first(cuda) -> None:
    small, large = torch.empty(10, device=cuda), torch.empty(2**20, device=cuda)

    def step() -> None:
        for _ in range(3):
            small.cpu().to(cuda)
        large.cpu().to(cuda)

    first, second = find_ping_pong(step)
    assert (first.times, first.bytes) == (1, 4 * 2**20)
    assert (second.times, second.bytes) == (3, 3 * 40)
    assert "4 MiB" in first.words
    assert "3 times" in second.words


def test_views_and_copies_into_a_buffer_carry_the_data(cuda) -> None:
    x, buffer = torch.empty(8, 8, device=cuda), torch.empty(8, 8)

    def step() -> None:
        buffer.copy_(x)
        buffer.view(-1)[3:7].clone().to(cuda)

    (trip,) = find_ping_pong(step)
    assert trip.bytes == 16


@pytest.mark.parametrize(
    "step",
    [
        lambda x, cuda: x.cpu(),
        lambda x, cuda: torch.empty(5).to(cuda),
        lambda x, cuda: (x.cpu(), torch.empty(5).to(cuda)),
        lambda x, cuda: x.cpu().to("cuda:1"),
        lambda x, cuda: (x * 2).relu(),
    ],
    ids=["logging", "input", "both", "to another device", "on the device"],
)
def test_what_does_not_come_back_is_no_ping_pong(cuda, step) -> None:
    x = torch.empty(5, device=cuda)
    assert find_ping_pong(lambda: step(x, cuda)) == []


def test_a_buffer_that_was_filled_again_brings_other_data(cuda) -> None:
    x, buffer = torch.empty(4, device=cuda), torch.empty(4)

    def step() -> None:
        buffer.copy_(x)
        buffer.copy_(torch.ones(4))
        buffer.to(cuda)

    assert find_ping_pong(step) == []


def test_a_step_on_the_cpu_runs_as_it_is() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4).to_sparse().to_dense()).sum().backward()
        optimizer.step()

    assert find_ping_pong(step) == []
    torch.testing.assert_close(model.weight.detach(), before - 0.3)


def test_an_error_in_the_step_comes_through() -> None:
    def step() -> None:
        raise KeyError("the step's own")

    with pytest.raises(KeyError, match="the step's own"):
        find_ping_pong(step)


@pytest.mark.gpu
def test_on_a_gpu_through_numpy_and_in_the_backward_pass() -> None:
    x = torch.ones(100, device="cuda", requires_grad=True)

    def through_numpy() -> None:
        array = x.detach().cpu().numpy()
        torch.from_numpy(array).cuda()

    (trip,) = find_ping_pong(through_numpy)
    assert trip.bytes == 400

    def with_backward() -> None:
        (x * 2).cpu().relu().cuda().sum().backward()

    trips = find_ping_pong(with_backward)
    assert sum(trip.times for trip in trips) == 2, "one forward, one for the gradient"
