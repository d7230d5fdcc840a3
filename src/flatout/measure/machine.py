"""The best rates of a machine, measured with torch: arithmetic, memory traffic, calls.

The measurement takes about three seconds, once for each machine, device and number of threads. The
result is kept in the cache folder. A fit reads a kept result, and measures only if it will take far
longer. If other jobs kept the machine busy, the rates are measured again the next time, and the
better ones are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

from flatout.cache_folder import keep_text, kept_text
from flatout.measure.fingerprint import fingerprint
from flatout.measure.meters import finish_device

_KIND = "roofline"
# Ratio of a rate between the two rounds. ROUGH: above it for one in ten rates, the result is rough.
# _UNKNOWN: the ratio of a rate that was measured once.
ROUGH, _UNKNOWN = 1.3, 10.0
# Channels, side of the kernel and groups.
_CONVOLUTIONS = {"conv": (64, 3, 1), "conv_1x1": (128, 1, 1), "conv_depthwise": (128, 3, 128)}
_CALLS = 200
# Factor of the sides of measured tensors on a GPU, which smaller ones would not keep busy.
_GPU = 4


def known_rates(device: str, threads: int) -> dict[str, Any] | None:
    """Return the rates of an earlier measurement; None without one, or if its file is damaged."""
    try:
        data = json.loads(kept_text(_KIND, _name(device, threads)) or "")
        return data if isinstance(data, dict) and "spread" in data else None
    except ValueError:
        return None


def machine_rates(device: str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """Return the best rates of this machine, measured at the first call.

    Args:
        threads: number of torch's threads in one operator; None for the present number.

    Returns:
        Plain data: `flops_per_s` by "fp32/contiguous" and similar, by kind and lane; `bytes_per_s`
        by precision, of `memory` and `cache`; `calls_per_s` and `nodes_per_s`, of tiny operators in
        forward and of their nodes in backward; `spread`, the ratio between the rounds that one in
        ten rates exceeds, which is more than `ROUGH` if there was no time for a second round; and
        `seconds`, the time of measuring.
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
    with suppress(OSError):  # if it fails, the rates are measured again the next time
        keep_text(_KIND, _name(device, threads), json.dumps(rates))
    return rates


def _name(device: str, threads: int) -> str:
    return f"{fingerprint().digest}-{device}-{threads}.json"


def _measured(device: str, rate_s: float = 0.02, longest_s: float = 2.5) -> dict[str, Any]:
    # There are two rounds, so that other jobs slow down at most one of them. In each round a rate
    # is measured at least once, and until `rate_s` have passed. The first round ends soon after
    # half of `longest_s`. Then the second one ends too, on a busy machine in its middle.
    started = perf_counter()
    if device != "cpu":
        # A kernel's first call on a GPU loads it, which takes longer than the whole measurement.
        for _, measure in _probes(device):
            measure(_once)
    began = perf_counter()
    first, second = _Round(began + longest_s / 2, rate_s), _Round(began + longest_s, rate_s)
    for places, measure in _probes(device):
        value = measure(first.best)
        first.found.update(dict.fromkeys(places, value))
    for places, measure in _probes(device):
        if second.is_late:
            break
        value = measure(second.best)
        second.found.update(dict.fromkeys(places, value))
    apart = [_UNKNOWN] * (len(first.found) - len(second.found))
    for place, value in second.found.items():
        pairs = zip(_numbers(value), _numbers(first.found[place]), strict=True)
        apart += [max(pair) / min(pair) for pair in pairs]
        first.found[place] = _faster(value, first.found[place])
    return {
        **_nested(first.found),
        "spread": sorted(apart)[int(0.9 * len(apart))],
        "seconds": perf_counter() - started,
    }


class _Round:
    def __init__(self, until: float, rate_s: float) -> None:
        self._until, self._rate_s = until, rate_s
        self.found: dict[tuple[str, ...], Any] = {}

    @property
    def is_late(self) -> bool:
        return perf_counter() > self._until

    def best(self, run: Callable[[], Any]) -> float:
        if not self.is_late:
            run()
        seconds: list[float] = []
        while not seconds or (sum(seconds) < self._rate_s and not self.is_late):
            finish_device()
            began = perf_counter()
            run()
            finish_device()
            seconds.append(perf_counter() - began)
        return min(seconds)


def _once(run: Callable[[], Any]) -> float:
    run()
    finish_device()
    return 1.0


_Best = Callable[[Callable[[], Any]], float]
_Place = tuple[str, ...]
_Probe = tuple[list[_Place], Callable[[_Best], Any]]


def _probes(device: str) -> Iterator[_Probe]:
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    layouts = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    for precision, dtype in dtypes.items():
        names = [f"{precision}/{name}" for name in layouts]
        of_both: list[_Place] = [("flops_per_s", name, "matmul") for name in names]
        yield of_both, partial(_matmul, device, dtype)
        for name, layout in zip(names, layouts.values(), strict=True):
            for kind, shape in _CONVOLUTIONS.items():
                place = ("flops_per_s", name, kind)
                yield [place], partial(_convolution, device, dtype, layout, shape)
        yield [("bytes_per_s", precision)], partial(_triad, device, dtype)
    yield [("calls_per_s",)], partial(_calls, device)
    yield [("nodes_per_s",)], partial(_nodes, device)


def _nested(found: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for (*outer, last), value in found.items():
        at = nested
        for name in outer:
            at = at.setdefault(name, {})
        at[last] = value
    return nested


def _numbers(rates: Any) -> list[float]:
    return list(rates.values()) if isinstance(rates, dict) else [rates]


def _faster(first: Any, other: Any) -> Any:
    if isinstance(first, dict):
        return {name: _faster(first[name], other[name]) for name in first}
    return max(first, other)


def _matmul(device: str, dtype: Any, best: _Best) -> dict[str, float]:
    import torch

    side = 768 * (1 if device == "cpu" else _GPU)
    a, b = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    rate = 2 * side**3 / best(lambda: a @ b)
    return {"forward": rate, "backward": rate}


def _convolution(
    device: str, dtype: Any, layout: Any, shape: tuple[int, int, int], best: _Best
) -> dict[str, float]:
    import torch

    channels, kernel, groups = shape
    side, size = 28, 8 * (1 if device == "cpu" else _GPU**2)
    x = torch.ones(size, channels, side, side, device=device, dtype=dtype)
    w = torch.ones(channels, channels // groups, kernel, kernel, device=device, dtype=dtype)
    x, w = (tensor.contiguous(memory_format=layout).requires_grad_() for tensor in (x, w))

    def forward() -> Any:
        return torch.nn.functional.conv2d(x, w, padding=kernel // 2, groups=groups)

    out = forward()
    gradient = torch.ones_like(out)
    flops = 2 * out.numel() * w[0].numel()
    backward = best(lambda: torch.autograd.grad(out, (x, w), gradient, retain_graph=True))
    return {"forward": flops / best(forward), "backward": 2 * flops / backward}


def _triad(device: str, dtype: Any, best: _Best) -> dict[str, float]:
    import torch

    result = {}
    for name, elements in (("memory", 2**23), ("cache", 2**16)):
        elements *= 1 if device == "cpu" else _GPU**2
        a, b, c = (torch.ones(elements, device=device, dtype=dtype) for _ in range(3))
        seconds = best(lambda a=a, b=b, c=c: torch.add(b, c, alpha=2, out=a))  # type: ignore[misc]
        result[name] = 3 * a.nbytes / seconds
    return result


def _calls(device: str, best: _Best) -> float:
    return _CALLS / best(_tiny(device)[1])


def _nodes(device: str, best: _Best) -> float:
    import torch

    x, forward = _tiny(device)
    out = forward()
    return _CALLS / best(lambda: torch.autograd.grad(out, x, retain_graph=True))


def _tiny(device: str) -> tuple[Any, Callable[[], Any]]:
    import torch

    x = torch.ones(1, device=device, requires_grad=True)

    def forward() -> Any:
        y = x
        for _ in range(_CALLS):
            y = y * y
        return y

    return x, forward
