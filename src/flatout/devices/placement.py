"""The placement of a model: its device, the modules that move there, and those that stay.

A module stays where the user put it: by `pin`, or by having moved it to another device than the CPU
before. If a model is spread over devices, each module moves its inputs to its own device.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from flatout.errors import DeviceError
from flatout.words import memory_words

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

# Begin of the reason if another device runs than was requested.
FALLBACK = "instead of"
_PIN = "_flatout_pinned_to"
_MOVED = "moved"

# GPUs with a ratio of free memory above this count as equally free.
_EQUALLY_FREE = 0.95


def resolve_device(name: str, strict: bool) -> tuple[torch.device, str]:
    """Return the device that a name means here, and the reason, in words.

    `auto` takes a CUDA device if one can be used, else the CPU; `cuda` takes any CUDA device. Among
    several, the one with the most free memory is taken. A missing device is replaced, and the
    reason names the replacement and the cause; with `strict` it is an error.

    Args:
        name: "auto", "cpu", "cuda", "cuda:1" or "mps".
        strict: whether to refuse rather than fall back.

    Raises:
        DeviceError: the name means no device, or the device is missing and `strict` is set.
    """
    import torch

    if name == "cpu":
        return torch.device("cpu"), "asked for"
    if name == "mps":
        if torch.backends.mps.is_available():
            return torch.device("mps"), "asked for"
        chosen, reason = _choose(name, strict, [], "this torch or machine has no Metal")
    else:
        chosen, reason = _choose(name, strict, *_usable_cuda())
    return torch.device(chosen), reason


def _choose(name: str, strict: bool, free: Sequence[int | None], missing: str) -> tuple[str, str]:
    if not re.fullmatch(r"auto|mps|cuda(:\d+)?", name):
        raise DeviceError(
            f"{name!r} is no device", do="use auto, cpu, cuda, cuda:0, cuda:1, ... or mps"
        )
    _, numbered, number = name.partition(":")
    if numbered and int(number) < len(free):
        return f"cuda:{int(number)}", "asked for"
    if free and not numbered:
        return _most_free(free)
    if name == "auto":
        return "cpu", missing
    here = f"{len(free)} CUDA device(s), numbered from 0" if free else f"none: {missing}"
    if strict:
        raise DeviceError(
            f"{name} is asked for and cannot be used; here: {here}",
            where='world.device with placement "strict"',
            do='ask for one that is here, or set world.placement to "soft"',
        )
    chosen, _ = _most_free(free) if free else ("cpu", "")
    return chosen, f"{FALLBACK} {name}, which cannot be used; here: {here}"


def _most_free(free: Sequence[int | None]) -> tuple[str, str]:
    if len(free) == 1:
        return "cuda:0", "the only CUDA device"
    most = max(amount or 0 for amount in free)
    index = next(i for i, amount in enumerate(free) if (amount or 0) >= _EQUALLY_FREE * most)
    if not most:
        return "cuda:0", f"the first of {len(free)} CUDA devices"
    return f"cuda:{index}", f"most free memory of {len(free)}: {memory_words(most)}"


def _usable_cuda() -> tuple[list[int | None], str]:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return [], f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.device_count():
        return [], "no CUDA device is visible"
    if not torch.cuda.is_available():
        return [], "the driver does not run this torch's CUDA"
    count = torch.cuda.device_count()
    return ([None], "") if count == 1 else (_free_memory(count), "")


def _free_memory(count: int) -> list[int | None]:
    import torch

    from flatout.devices.inventory import inventory

    devices = inventory()
    free = {
        gpu.uuid: gpu.memory_total - gpu.memory_used
        for gpu in devices.nvml.gpus
        if gpu.memory_total is not None and gpu.memory_used is not None
    }
    if devices.cuda_order_certain and len(devices.cuda) == count:
        return [free.get(device.uuid) for device in devices.cuda]
    names = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]
    return [free.get(name) for name in names]


class Placed(NamedTuple):
    module: str
    device: str
    reason: str


@dataclass(frozen=True)
class Placement:
    """The devices of a model's modules.

    Args:
        device: the requested device; inputs belong there, and outputs return there.
        modules: an entry for each module with its own parameters or buffers, in model order.
    """

    device: torch.device
    modules: tuple[Placed, ...]
    _hooks: list[RemovableHandle] = field(default_factory=list, repr=False)

    def describe_fallbacks(self) -> list[str]:
        """Return a line for each module that is not on the device it was pinned to."""
        return [
            f"{module or 'the model'} runs on {device} {reason}"
            for module, device, reason in self.modules
            if reason.startswith(FALLBACK)
        ]

    @property
    def spread(self) -> bool:
        """True if the model is on more than one device, or on another one than `device`."""
        return any(placed.device != str(self.device) for placed in self.modules)

    def describe(self) -> str:
        """Return a line for each sequence of neighbors with one device and reason."""
        lines = []
        for (device, reason), group in itertools.groupby(self.modules, lambda placed: placed[1:]):
            names = [placed.module or "(the model itself)" for placed in group]
            name = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
            lines.append(f"{name}: {device}, {reason}")
        return "\n".join(lines) or "no module has parameters or buffers"

    def release(self) -> None:
        """Remove the hooks that move inputs between devices."""
        while self._hooks:
            self._hooks.pop().remove()


# The hooks of a model's last placement, so that placing it again does not add them twice.
_placements: WeakKeyDictionary[nn.Module, Placement] = WeakKeyDictionary()

# Devices to which a placement moved modules: the user's own moves are pins, these are not.
_moved: WeakKeyDictionary[nn.Module, torch.device] = WeakKeyDictionary()


def pin(module: nn.Module, device: str | torch.device) -> nn.Module:
    """Mark a module, with all parts inside it, for a device of its own, and return it."""
    import torch

    setattr(module, _PIN, torch.device(device))
    return module


def place(model: nn.Module, device: str | torch.device, *, strict: bool = False) -> Placement:
    """Move a model to a device, except for pinned modules, and return the devices of all modules.

    A module is pinned by `pin`, or by having been moved to another device than the CPU before. A
    module that shares a parameter with a pinned one goes with it. Parameters stay the same objects,
    so that an existing optimizer keeps them. Placing again replaces the last placement.

    A module that is pinned to a missing device goes with the model, and its reason says so; with
    `strict` that is an error.

    Raises:
        DeviceError: a parameter or buffer is on the meta device, so there is nothing to move; or
            `strict` is set, and a module is pinned to a missing device.
    """
    import torch

    target = _numbered(torch.device(device))
    _refuse_meta(model, target)
    homes = _homes(model, target, strict)
    if all(home == target for home, _ in homes.values()):
        model.to(target)
    else:
        for module, (home, _) in homes.items():
            if all(tensor.device == home for tensor in _own(module)):
                continue
            # `module.to` calls this method, here for this module alone.
            module._apply(_Mover(home).move, recurse=False)  # type: ignore[no-untyped-call]
    _moved.update({module: home for module, (home, reason) in homes.items() if reason == _MOVED})
    names = {module: name for name, module in model.named_modules()}
    placed = tuple(Placed(names[m], str(home), reason) for m, (home, reason) in homes.items())
    placement = Placement(target, placed)
    if model in _placements:
        _placements[model].release()
    _placements[model] = placement
    if placement.spread:
        _carry_between(model, homes, placement)
    return placement


def _carry_between(
    model: nn.Module,
    homes: dict[nn.Module, tuple[torch.device, str]],
    placement: Placement,
) -> None:
    for module, (home, _) in homes.items():
        carry = _Mover(home).carry_in
        hook = module.register_forward_pre_hook(carry, prepend=True, with_kwargs=True)
        placement._hooks.append(hook)
    carry_out = _Mover(placement.device).carry_out
    placement._hooks.append(model.register_forward_hook(carry_out))


def _numbered(device: torch.device) -> torch.device:
    import torch

    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _refuse_meta(model: nn.Module, target: torch.device) -> None:
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    empty = [name for name, tensor in tensors if tensor.device.type == "meta"]
    if empty and target.type != "meta":
        raise DeviceError(
            f"{empty[0]} is on the meta device, which holds no values, so it cannot be moved",
            where=f"{len(empty)} parameter(s) or buffer(s) of the model",
            do="load the weights, or call model.to_empty(device=...) and initialize them, before",
        )


def _homes(
    model: nn.Module, target: torch.device, strict: bool
) -> dict[nn.Module, tuple[torch.device, str]]:
    homes: dict[nn.Module, tuple[torch.device, str]] = {}

    def visit(module: nn.Module, pinned: torch.device | None, why: str) -> None:
        if hasattr(module, _PIN):
            pinned, why = _pinned_device(module, target, strict)
        own = _own(module)
        if own and module not in homes:
            here = own[0].device
            by_user = here.type not in ("cpu", "meta") and here != _moved.get(module)
            if pinned is not None:
                homes[module] = pinned, why
            elif here == target:
                homes[module] = target, "was there"
            elif by_user:
                homes[module] = here, "pinned: it was moved there before"
            else:
                homes[module] = target, _MOVED
        for child in module.children():
            visit(child, pinned, why)

    visit(model, None, "")
    _send_sharers_along(homes, target)
    return homes


def _pinned_device(
    module: nn.Module, target: torch.device, strict: bool
) -> tuple[torch.device, str]:
    device: torch.device = getattr(module, _PIN)
    if _is_here(device):
        return _numbered(device), "pinned"
    if strict:
        raise DeviceError(
            f"a {type(module).__name__} is pinned to {device}, which cannot be used here",
            where='world.device with placement "strict"',
            do='pin it to a device that is here, or set world.placement to "soft"',
        )
    return target, f"{FALLBACK} {device}, to which it is pinned and which cannot be used here"


def _is_here(device: torch.device) -> bool:
    import torch

    if device.type in ("cpu", "meta"):
        return True
    kind = getattr(torch.backends if device.type == "mps" else torch, device.type, None)
    if kind is None or not kind.is_available():
        return False
    return device.type == "mps" or (device.index or 0) < kind.device_count()


def _send_sharers_along(
    homes: dict[nn.Module, tuple[torch.device, str]], target: torch.device
) -> None:
    home_of: dict[int, torch.device] = {}
    for module, (home, _) in homes.items():
        if home != target:
            home_of |= {id(tensor): home for tensor in _own(module)}
    for module, (home, _) in homes.items():
        shared = [home_of[id(tensor)] for tensor in _own(module) if id(tensor) in home_of]
        if home == target and shared:
            homes[module] = shared[0], "shares a parameter with a pinned module"


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


class _Mover:
    """Moves tensors, and the tensors in tuples, lists and dicts, to one device. Can be pickled."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def carry_in(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self.move(args), self.move(kwargs)

    def carry_out(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.move(output)

    def move(self, value: Any) -> Any:
        import torch
        from torch.nn.utils.rnn import PackedSequence

        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        if isinstance(value, PackedSequence):
            return value.to(self.device)  # type: ignore[arg-type]  # its stub knows dtypes only
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.move, value))
        if type(value) in (tuple, list):
            return type(value)(map(self.move, value))
        if type(value) is dict:
            return {key: self.move(item) for key, item in value.items()}
        return value
