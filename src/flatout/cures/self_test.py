"""Self-test of the hooks in this version of torch: they are called, and change no bit of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

from flatout.cures.roots import Call, Roots
from flatout.cures.steps import ScriptSteps
from flatout.errors import FlatoutError


def check(torch: Any) -> None:
    """Train a model of two layers for one step, without hooks and with hooks, and compare.

    The test draws no random number, starts no thread and touches no device, because the script may
    still want to set seeds, threads and devices.
    """
    with _without_compiler(torch):
        plain, _ = _step(torch)
        steps, met = ScriptSteps({}), []

        def cure(module: Any, args: Any, kwargs: Any, call: Call) -> Call:
            met.append(type(module))
            return call

        before = vars(torch.nn.Module)["__call__"], torch.optim.Optimizer.add_param_group
        steps.watch(torch)
        roots = Roots(torch, steps, [cure])
        try:
            hooked, model = _step(torch)
        finally:
            roots.end()
            steps.unwatch()
    if steps.count != 1:
        raise FlatoutError(f"one optimizer step was counted as {steps.count} steps")
    if met != [type(model)]:
        raise FlatoutError("the outermost module of a step was not found")
    if not all(torch.equal(a, b) for a, b in zip(plain, hooked, strict=True)):
        raise FlatoutError("a step with hooks has another result than a step without hooks")
    if before != (vars(torch.nn.Module)["__call__"], torch.optim.Optimizer.add_param_group):
        raise FlatoutError("the hooks cannot be removed")


def _step(torch: Any) -> tuple[list[Any], Any]:
    """Return the output and the weights after one step, and the model."""
    nn = torch.nn

    class Descent(torch.optim.Optimizer):  # type: ignore[misc]
        """Plain gradient descent: torch's own optimizers import the compiler."""

        def step(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.1)

    # PReLU draws no random weights. A backward pass would search for devices.
    model = nn.Sequential(nn.PReLU(4, device="cpu"), nn.PReLU(4, device="cpu"))
    optimizer = Descent(model.parameters(), {})
    with torch.no_grad():
        output = model(torch.tensor([[0.5, -1.5, 3.0, -0.1]], device="cpu"))
        for parameter in model.parameters():
            parameter.grad = parameter * output.sum()
    optimizer.step()
    return [output, *(parameter.detach() for parameter in model.parameters())], model


@contextmanager
def _without_compiler(torch: Any) -> Iterator[None]:
    """Keep `add_param_group` from importing torch's compiler, which takes a second."""
    function, name = unwrap(torch.optim.Optimizer.add_param_group), "__dynamo_disable"
    is_there = hasattr(function, name)
    if not is_there:
        setattr(function, name, function)
    try:
        yield
    finally:
        if not is_there:
            delattr(function, name)
