"""What a machine can do at most, measured with torch: arithmetic, memory traffic, calls.

A few seconds, once for each machine, device and number of threads: the result is kept in the cache
folder. A fit reads what is there, and measures only where it will last far longer. Where other jobs
kept the machine busy meanwhile, the rates are measured again the next time, and the better ones
kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from time import perf_counter
from typing import Any

from flatout.atomic_file import atomic_write
from flatout.cache_folder import cache_folder, kind_folder, private
from flatout.measure.fingerprint import fingerprint
from flatout.measure.meters import finish_device

_KIND = "roofline"
# Each is measured in two rounds, so that other jobs hold up one of them at most; in each of them
# until so many seconds have passed, twice at least.
_ROUNDS = 2
_SECONDS = 0.04
# Rates are rough where one in ten differs by more between the rounds.
ROUGH = 1.3
_CALLS = 200
# Of the sides of what is measured on a GPU, which would not be busy with less.
_GPU = 4


def known_rates(device: str, threads: int) -> dict[str, Any] | None:
    """What was measured before; None where nothing was, or its file is damaged.

    Args:
        device: "cpu" or "cuda".
        threads: of torch, in one operator.
    """
    try:
        found = json.loads((cache_folder() / _KIND / _name(device, threads)).read_text())
        return found if isinstance(found, dict) and "spread" in found else None
    except (OSError, ValueError):
        return None


def machine_rates(device: str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """The best rates of this machine, measured the first time that someone asks.

    Args:
        device: "cpu" or "cuda".
        threads: of torch, in one operator; None for those it has now.

    Returns:
        Plain data: `flops_per_s` by "fp32/contiguous" and the like, by kind and lane; `bytes_per_s`
        by precision, of `memory` and `cache`; `calls_per_s` and `nodes_per_s`, of tiny operators in
        forward and of their nodes in backward; `spread`, how many times as large one in ten was in
        another round; and `seconds`, what measuring took.
    """
    import torch

    own = torch.get_num_threads()
    threads = own if threads is None else threads
    known = known_rates(device, threads)
    if known is not None and known["spread"] <= ROUGH:
        return known
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            rates = _measured(device)
    finally:
        torch.set_num_threads(own)
    if known is not None:
        least = min(rates["spread"], known["spread"])
        rates = {**_faster(rates, known), "spread": least}
    with suppress(OSError):  # measured again the next time
        path = kind_folder(_KIND) / _name(device, threads)
        with atomic_write(path, opener=private) as file:
            file.write(json.dumps(rates))
    return rates


def _name(device: str, threads: int) -> str:
    return f"{fingerprint().digest}-{device}-{threads}.json"


def _measured(device: str) -> dict[str, Any]:
    began = perf_counter()
    rounds = [_round(device) for _ in range(_ROUNDS)]
    sides = [sorted(pair) for pair in zip(*map(_numbers, rounds), strict=True)]
    apart = sorted(side[-1] / side[0] for side in sides)
    return {
        **reduce(_faster, rounds),
        "spread": apart[int(0.9 * len(apart))],
        "seconds": perf_counter() - began,
    }


def _numbers(rates: Any) -> list[float]:
    return (
        [n for value in rates.values() for n in _numbers(value)]
        if isinstance(rates, dict)
        else [rates]
    )


def _round(device: str) -> dict[str, Any]:
    """Rates, of which more is better."""
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    layouts = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    flops = {}
    for precision, dtype in dtypes.items():
        matmul = _matmul(device, dtype)
        for name, layout in layouts.items():
            flops[f"{precision}/{name}"] = {
                "matmul": {"forward": matmul, "backward": matmul},
                "conv": _convolution(device, dtype, layout, 64, 3, 1),
                "conv_1x1": _convolution(device, dtype, layout, 128, 1, 1),
                "conv_depthwise": _convolution(device, dtype, layout, 128, 3, 128),
            }
    calls, nodes = _dispatch(device)
    bytes_per_s = {name: _triad(device, dtype) for name, dtype in dtypes.items()}
    return {
        "flops_per_s": flops,
        "bytes_per_s": bytes_per_s,
        "calls_per_s": calls,
        "nodes_per_s": nodes,
    }


def _best(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of some runs, after one that does not count."""
    run()
    seconds: list[float] = []
    while len(seconds) < 2 or sum(seconds) < _SECONDS:
        finish_device()
        began = perf_counter()
        run()
        finish_device()
        seconds.append(perf_counter() - began)
    return min(seconds)


def _faster(one: Any, other: Any) -> Any:
    """The better of two measurements, number by number."""
    if isinstance(one, dict):
        return {name: _faster(one[name], other[name]) for name in one}
    return max(one, other)


def _matmul(device: str, dtype: Any) -> float:
    import torch

    side = 768 * (1 if device == "cpu" else _GPU)
    a, b = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    return float(2 * side**3 / _best(lambda: a @ b))


def _convolution(
    device: str, dtype: Any, layout: Any, channels: int, kernel: int, groups: int
) -> dict[str, float]:
    """FLOP per second of forward, and of backward for inputs and weights."""
    import torch

    side, size = 28, 8 * (1 if device == "cpu" else _GPU**2)
    x = torch.ones(size, channels, side, side, device=device, dtype=dtype)
    w = torch.ones(channels, channels // groups, kernel, kernel, device=device, dtype=dtype)
    x, w = (tensor.contiguous(memory_format=layout).requires_grad_() for tensor in (x, w))

    def forward() -> Any:
        return torch.nn.functional.conv2d(x, w, padding=kernel // 2, groups=groups)

    out = forward()
    gradient = torch.ones_like(out)
    flops = 2 * out.numel() * w[0].numel()
    backward = _best(lambda: torch.autograd.grad(out, (x, w), gradient, retain_graph=True))
    return {"forward": flops / _best(forward), "backward": 2 * flops / backward}


def _triad(device: str, dtype: Any) -> dict[str, float]:
    """Bytes per second of a = b + 2 c, for tensors that a cache holds and for large ones."""
    import torch

    found = {}
    for name, elements in (("memory", 2**23), ("cache", 2**16)):
        elements *= 1 if device == "cpu" else _GPU**2
        a, b, c = (torch.ones(elements, device=device, dtype=dtype) for _ in range(3))
        seconds = _best(lambda a=a, b=b, c=c: torch.add(b, c, alpha=2, out=a))  # type: ignore[misc]
        found[name] = 3 * a.nbytes / seconds
    return found


def _dispatch(device: str) -> tuple[float, float]:
    """Tiny operators a second in forward, and their nodes a second in backward."""
    import torch

    x = torch.ones(1, device=device, requires_grad=True)

    def forward() -> Any:
        y = x
        for _ in range(_CALLS):
            y = y * y
        return y

    out = forward()
    node = _best(lambda: torch.autograd.grad(out, x, retain_graph=True))
    return _CALLS / _best(forward), _CALLS / node
