"""Batches on a GPU: the same ones, from the host or gathered there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flatout

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


def trained(device, train, on_device, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 4))
    recipe = flatout.Recipe(
        world={"device": str(device)}, input={"on_device": on_device}, compute={"precision": "fp32"}
    )
    trainer = flatout.Trainer(model, loss="cross_entropy", recipe=recipe, allow="exact")
    x, y = torch.rand(40, 48), torch.arange(40) % 4
    history = trainer.fit(train, epochs=3, validation_data=(x, y), progress=False, **options)
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    return weights, history, trainer.predict(x)


@pytest.mark.parametrize("kind", ["arrays", "scaled", "pipeline", "weighted"])
def test_batches_gathered_there_are_those_of_the_host(device, kind):
    torch.manual_seed(1)
    images, classes = torch.randint(0, 256, (203, 48), dtype=torch.uint8), torch.arange(203) % 4
    options = {"batch_size": 32}
    if kind == "scaled":
        train = flatout.data.arrays(images, classes, scale=1 / 255, shift=-0.5)
    elif kind == "pipeline":
        train = flatout.data.arrays(images.float(), classes).shuffle(seed=3).batch(32)
        options = {}
    else:
        train = (images.float() / 255, classes)
        train += (torch.rand(203),) if kind == "weighted" else ()
    host, before, predicted = trained(device, train, "off", **options)
    there, history, also = trained(device, train, "auto", **options)
    assert host.keys() == there.keys()
    for name, tensor in host.items():
        torch.testing.assert_close(there[name], tensor, rtol=0, atol=0, msg=name)
    assert torch.equal(predicted, also)
    assert before.recipe.input.on_device == "off"
    expected = "on" if device.type == "cuda" else "off"
    assert history.recipe.input.on_device == expected
