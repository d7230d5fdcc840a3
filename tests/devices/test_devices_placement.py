import copy
import pickle
from contextlib import suppress

import pytest
import torch
from devices_fakes import GIB
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.devices import pin, place, resolve_device
from flatout.devices.placement import Placed, _choose, _homes
from flatout.errors import DeviceError

HERE = [20 * GIB, 10 * GIB, 22 * GIB]
MISSING = "torch 2.13.0 is built without CUDA"


@pytest.mark.parametrize(
    ("name", "free", "device", "words"),
    [
        ("auto", [], "cpu", MISSING),
        ("auto", [None], "cuda:0", "the only CUDA device"),
        ("auto", HERE, "cuda:2", "most free memory of 3: 22.0 GiB"),
        ("cuda", HERE, "cuda:2", "most free memory"),
        ("auto", [20 * GIB, 20 * GIB + 1], "cuda:0", "most free memory"),
        ("auto", [None, None], "cuda:0", "the first of 2 CUDA devices"),
        ("cuda:1", HERE, "cuda:1", "asked for"),
        ("cuda:9", HERE, "cuda:2", "instead of cuda:9, which cannot be used; here: 3 CUDA"),
        ("cuda", [], "cpu", f"instead of cuda, which cannot be used; here: none: {MISSING}"),
        ("cuda:1", [], "cpu", "instead of cuda:1"),
    ],
)
def test_soft_placement_falls_back_and_says_why(name, free, device, words) -> None:
    chosen, reason = _choose(name, False, free, MISSING)
    assert chosen == device
    assert words in reason


@pytest.mark.parametrize(
    ("name", "free", "words"),
    [("cuda:3", HERE, "3 CUDA device"), ("cuda", [], MISSING), ("cuda:0", [], MISSING)],
)
def test_strict_placement_fails_and_says_what_is_there(name, free, words) -> None:
    with pytest.raises(DeviceError, match=words) as caught:
        _choose(name, True, free, MISSING)
    assert caught.value.where
    assert caught.value.do


@pytest.mark.parametrize("name", ["auto", "cuda:0"])
def test_strict_placement_takes_what_is_there(name) -> None:
    assert _choose(name, True, [None], "")[0] == "cuda:0"


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:x", "auto:1", "", "CUDA"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_name_that_means_nothing_is_refused(name, strict) -> None:
    with pytest.raises(DeviceError, match="is no device"):
        resolve_device(name, strict)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_on_a_machine_without_cuda() -> None:
    device, reason = resolve_device("auto", True)
    assert device == torch.device("cpu")
    assert "CUDA" in reason
    device, reason = resolve_device("cuda:1", False)
    assert device == torch.device("cpu")
    assert "instead of cuda:1" in reason
    with pytest.raises(DeviceError, match="cuda:1 is asked for"):
        resolve_device("cuda:1", True)


def test_the_cpu_is_there_when_asked_for() -> None:
    assert resolve_device("cpu", True) == (torch.device("cpu"), "asked for")


def test_each_module_with_tensors_is_logged() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.BatchNorm1d(2)))
    placement = place(model, "cpu")
    assert placement.modules == (
        Placed("0", "cpu", "was there"),
        Placed("2.0", "cpu", "was there"),
    )
    assert not placement.spread
    assert placement.describe() == "0 ... 2.0 (2): cpu, was there"


def test_a_whole_model_moves() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    placement = place(model, "meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert [one.reason for one in placement.modules] == ["moved", "moved"]
    assert not any(module._forward_pre_hooks for module in model.modules())


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.body = nn.Linear(2, 2)

    def forward(self, x):
        return self.body(x) * self.scale


def test_the_root_may_have_parameters_of_its_own() -> None:
    words = place(Root(), "meta").describe()
    assert words == "(the model itself) ... body (2): meta, moved"


def test_a_pinned_module_stays_with_all_inside_it() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = nn.Sequential(pin(inner, "cpu"), nn.Linear(2, 2))
    placement = place(model, "meta")
    assert placement.modules == (
        Placed("0.0", "cpu", "pinned"),
        Placed("0.1", "cpu", "pinned"),
        Placed("1", "meta", "moved"),
    )
    assert placement.describe() == "0.0 ... 0.1 (2): cpu, pinned\n1: meta, moved"
    assert [p.device.type for p in model.parameters()] == ["cpu"] * 4 + ["meta"] * 2
    assert inner[1].running_mean.device.type == "cpu"


def test_an_inner_pin_goes_before_an_outer_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), pin(nn.Linear(2, 2), "meta"))
    placement = place(pin(model, "cpu"), "meta")
    assert [one.device for one in placement.modules] == ["cpu", "meta"]


def test_each_module_takes_its_inputs_to_itself() -> None:
    seen = []

    class Look(nn.Linear):
        def forward(self, x, nested):
            seen.append((x.device.type, nested["more"][0].device.type, nested["text"]))
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Look(2, 2)
            self.second = Look(2, 2)

        def forward(self, x):
            x = self.first(x, nested={"more": [x], "text": "left alone"})
            return self.second(x, nested={"more": (x,), "text": "left alone"})

    model = Model()
    pin(model.first, "cpu")
    place(model, "meta")
    output = model(torch.ones(3, 2))
    assert seen == [("cpu", "cpu", "left alone"), ("meta", "meta", "left alone")]
    assert output.device.type == "meta"


def test_outputs_come_back_to_the_device_of_the_model() -> None:
    model = nn.Sequential(pin(nn.Linear(2, 2), "cpu"))
    place(model, "meta")
    assert model(torch.ones(1, 2)).device.type == "meta"


def test_recurrent_inputs_and_packed_sequences_are_carried() -> None:
    model = nn.Sequential(pin(nn.Embedding(5, 4), "cpu"), nn.GRU(4, 4))
    place(model, "meta")
    output, hidden = model(torch.zeros(3, 2, dtype=torch.long))
    assert (output.device.type, hidden.device.type) == ("meta", "meta")
    gru = nn.Sequential(pin(nn.GRU(4, 4), "cpu"))
    place(gru, "cpu")
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    assert gru(packed)[0].data.shape == (5, 4)


def test_placing_again_replaces_the_hooks_and_release_takes_them_off() -> None:
    model = nn.Sequential(pin(nn.Linear(2, 2), "cpu"), nn.Linear(2, 2))

    def hooks():
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

    place(model, "meta")
    assert hooks() == 3
    placement = place(model, "meta")
    assert hooks() == 3
    placement.release()
    assert hooks() == 0


def test_a_module_that_shares_a_parameter_with_a_pinned_one_goes_with_it() -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(pin(embedding, "cpu"), nn.Linear(4, 4), head)
    placement = place(model, "meta")
    assert placement.modules[2] == Placed("2", "cpu", "shares a parameter with a pinned module")
    assert head.weight is embedding.weight
    assert head.weight.device.type == "cpu"


def test_a_module_that_the_user_moved_stays() -> None:
    class Held(nn.Module):
        def __init__(self, device) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, 2, device=device), requires_grad=False)

    with FakeTensorMode(), torch.no_grad():
        model = nn.Sequential(Held("cuda:0"), Held("cpu"), Held("cuda:1"))
        homes = _homes(model, torch.device("cuda:1"), strict=False)
    assert [(str(device), reason) for device, reason in homes.values()] == [
        ("cuda:0", "pinned: it was moved there before"),
        ("cuda:1", "moved"),
        ("cuda:1", "was there"),
    ]


def test_a_module_that_a_placement_moved_is_not_pinned_by_that() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, 2), requires_grad=False)

    # In a process' first conversion torch holds weak references to fake tensors, and fails.
    with FakeTensorMode(), torch.no_grad(), suppress(RuntimeError):
        Held().to("cuda:0")
    with FakeTensorMode(), torch.no_grad():
        model = nn.Sequential(Held())
        place(model, "cuda:0")
        assert place(model, "cpu").modules == (Placed("0", "cpu", "moved"),)
    assert model[0].weight.device.type == "cpu"


def test_a_parameter_without_values_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(DeviceError, match=r"1\.weight is on the meta device") as caught:
        place(model, "cpu")
    assert "to_empty" in caught.value.do


@pytest.mark.parametrize("device", ["cuda:99", "xpu:99"])
def test_a_pin_to_a_device_that_is_not_here_falls_back_unless_strict(device: str) -> None:
    model = nn.Sequential(pin(nn.Sequential(nn.Linear(2, 2)), device), nn.Linear(2, 2))
    with pytest.raises(DeviceError, match=f"a Sequential is pinned to {device}"):
        place(model, "cpu", strict=True)
    placement = place(model, "cpu")
    why = f"instead of {device}, to which it is pinned and which cannot be used here"
    assert placement.describe_fallbacks() == [f"0.0 runs on cpu {why}"]
    assert not placement.spread
    assert model(torch.ones(1, 2)).device.type == "cpu"
    # Another pin, inside, holds.
    pin(model[0][0], "cpu")
    assert place(model, "cpu", strict=False).describe_fallbacks() == []


def test_a_spread_model_can_be_copied_and_pickled() -> None:
    model = nn.Sequential(pin(nn.Linear(2, 2), "cpu"), nn.Linear(2, 2))
    place(model, "meta")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin(torch.ones(1, 2)).device.type == "meta"


def test_an_optimizer_made_before_holds_the_same_parameters() -> None:
    model = nn.Sequential(pin(nn.Linear(2, 2), "cpu"), nn.Linear(2, 2))
    before = list(model.parameters())
    place(model, "cpu")
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_a_model_without_parameters_has_words_too() -> None:
    assert place(nn.ReLU(), "cpu").describe() == "no module has parameters or buffers"


@pytest.mark.gpu
def test_a_spread_model_learns_as_on_one_device() -> None:
    def gradients(spread):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        if spread:
            pin(model[0], "cpu")
            pin(model[3], "cpu")
        before = list(model.parameters())
        place(model, "cuda")
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        model(torch.arange(9, device="cuda")).square().mean().backward()
        return [p.grad.cpu() for p in model.parameters()]

    for one, two in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.gpu
def test_auto_takes_the_gpu() -> None:
    device, _ = resolve_device("auto", True)
    assert device.type == "cuda"
    torch.ones(1, device=device)
    with pytest.raises(DeviceError):
        resolve_device(f"cuda:{torch.cuda.device_count()}", True)
