"""What a forward makes of a batch is made of another batch by the same calls."""

import torch

from flatout.models import InputRecording


def recorded(make, *inputs):
    with InputRecording(inputs) as recording:
        wanted = make(*inputs)
    return recording.of(wanted)


def test_ids_of_another_batch_are_made_as_the_forward_makes_them():
    offsets = torch.arange(4) * 100

    def ids(x, y):
        first, *_ = x.unbind(1)
        hashed = torch.remainder(x[:, 1:3].float().long() * 7, 5)
        return [x, x[:, 0], x + offsets, torch.cat([hashed, y[:, None]], 1), first, offsets]

    one = torch.randint(9, (6, 4)), torch.randint(9, (6,))
    other = torch.randint(9, (3, 4)), torch.randint(9, (3,))  # of another size
    replayed = recorded(ids, *one)
    for _ in range(2):
        assert all(map(torch.equal, replayed(other), ids(*other)))


def test_what_writes_or_draws_is_not_done_again():
    counter = torch.zeros(1, dtype=torch.int64)

    def ids(x):
        counter.add_(1)
        noise = torch.randint(9, x.shape)
        return [x + counter, x + noise, x.clone().add_(1)]

    x = torch.arange(6)
    replayed = recorded(ids, x)
    state = torch.get_rng_state()
    counted, noisy, written = replayed([x + 1])
    assert torch.equal(torch.get_rng_state(), state)
    assert counter.item() == 1
    assert torch.equal(counted, x + 2)
    assert noisy.shape == x.shape
    assert torch.equal(x, torch.arange(6))
    assert written is not None


def test_calls_with_a_gradient_are_not_kept():
    weight = torch.nn.Parameter(torch.rand(6))
    x = torch.arange(6)
    (replayed,) = (recorded(lambda x: [(x * weight).long(), x * 2], x),)
    assert torch.equal(replayed([x + 1])[1], (x + 1) * 2)
    assert torch.equal(replayed([x + 1])[0], (x * weight).long())
