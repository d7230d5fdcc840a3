"""Rewrites of Keras layers on the torch backend: the same layers with less memory traffic.

Keras copies channels-last images into another order before it pools them. It adds the bias of a
convolution in a separate pass, and under autocast that addition leaves half precision. Here

    Conv2D, Dense     call torch's operator with the bias inside
    MaxPooling2D      pools the images in their own memory order
    ReLU -> 2x2 pool  becomes one pass over memory (relu_pool)

Adding the bias inside the operator rounds differently. The layers, their names, weights and
configuration stay as they are; only their `call` is replaced while the model trains.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from flatout.models.keras.layers import replace_call
from flatout.models.relu_pool import relu_pool

Call = Callable[[torch.Tensor], torch.Tensor]
_here = threading.local()


@contextmanager
def training_step() -> Iterator[None]:
    """Within this context, allow layers to leave their ReLU to the pooling layer that follows.

    Outside of this context, other code may read a layer's output, such as a callback that computes
    features.
    """
    before = _is_step()
    _here.is_step = True
    try:
        yield
    finally:
        _here.is_step = before


def _is_step() -> bool:
    return getattr(_here, "is_step", False)


def keras_calls(model: Any) -> dict[Any, Call]:
    """Return the faster `call` of each layer for which it exists. Changes nothing."""
    calls: dict[Any, Call] = {}
    kinds, left_to_pools = _kinds(), set[Any]()
    for layer in model._flatten_layers():
        make = kinds.get(type(layer))
        call = None if make is None or not _is_plain(layer) else make(layer, left_to_pools)
        if call is not None:
            calls[layer] = call
    if _runs_its_graph(model):
        for layer, pool in _pairs(model, calls):
            left_to_pools.add(layer)
            calls[pool] = _with_relu(calls[pool])
    return calls


def put_on(model: Any, calls: dict[Any, Call]) -> Callable[[], None]:
    """Set the layers' faster `call`, and return a function that undoes it."""
    undos = [replace_call(layer, call) for layer, call in calls.items()]
    uncast = [layer for layer in _passing_on(model) if layer.autocast]
    for layer in uncast:
        vars(layer)["autocast"] = False

    def undo() -> None:
        for put_back in undos:
            put_back()
        for layer in uncast:
            vars(layer)["autocast"] = True

    return undo


def _passing_on(model: Any) -> list[Any]:
    from keras import layers

    kinds = {*_kinds(), layers.Flatten, layers.Reshape, layers.Dropout, layers.ReLU}
    return [
        layer
        for layer in model._flatten_layers()
        if type(layer) in kinds and layer.compute_dtype == layer.variable_dtype == "float32"
    ]


def _kinds() -> dict[type, Callable[[Any, Collection[Any]], Call | None]]:
    from keras import layers

    return {layers.Conv2D: _conv, layers.Dense: _dense, layers.MaxPooling2D: _pool}


def _is_plain(layer: Any) -> bool:
    return (
        "call" not in vars(layer)
        and getattr(layer, "quantization_mode", None) is None
        and not getattr(layer, "_remat_mode", None)
        and getattr(layer, "data_format", "channels_last") == "channels_last"
    )


# -- single layers ---------------------------------------------------------------------------------


def _conv(layer: Any, left_to_pools: Collection[Any]) -> Call | None:
    odd = all(size % 2 for size in layer.kernel_size)
    if layer.padding == "same" and odd and set(layer.strides) == {1}:
        sides = zip(layer.kernel_size, layer.dilation_rate, strict=True)
        padding = [(size - 1) // 2 * dilation for size, dilation in sides]
    elif layer.padding == "valid":
        padding = [0, 0]
    else:
        return None  # uneven padding

    def call(inputs: torch.Tensor) -> torch.Tensor:
        outputs = F.conv2d(
            _in_its_precision(layer, inputs).permute(0, 3, 1, 2),
            _value(layer.kernel).permute(3, 2, 0, 1),
            _value(layer.bias) if layer.use_bias else None,
            layer.strides,
            padding,
            layer.dilation_rate,
            layer.groups,
        ).permute(0, 2, 3, 1)
        if layer.activation is None or (layer in left_to_pools and _is_step()):
            return outputs
        activated: torch.Tensor = layer.activation(outputs)
        return activated

    return call


def _dense(layer: Any, _left_to_pools: Collection[Any]) -> Call | None:
    def call(inputs: torch.Tensor, training: bool | None = None) -> torch.Tensor:
        bias = None if layer.bias is None else _value(layer.bias)
        outputs = F.linear(
            _in_its_precision(layer, inputs), _value(layer.kernel).transpose(0, 1), bias
        )
        return outputs if layer.activation is None else layer.activation(outputs)

    return call


def _pool(layer: Any, _left_to_pools: Collection[Any]) -> Call | None:
    if layer.padding != "valid":
        return None

    def call(inputs: torch.Tensor) -> torch.Tensor:
        images = inputs.permute(0, 3, 1, 2)
        return F.max_pool2d(images, layer.pool_size, layer.strides).permute(0, 2, 3, 1)

    return call


def _in_its_precision(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled(inputs.device.type) or not inputs.is_floating_point():
        return inputs
    return inputs.to(getattr(torch, layer.compute_dtype))


def _value(variable: Any) -> torch.Tensor:
    value: torch.Tensor = variable if torch.is_tensor(variable) else variable.value
    return value


# -- ReLU and the pool after it --------------------------------------------------------------------


def _runs_its_graph(model: Any) -> bool:
    from keras import Sequential
    from keras.src.models.functional import Functional

    return type(model) in (Sequential, Functional)


def _pairs(model: Any, calls: dict[Any, Call]) -> Iterator[tuple[Any, Any]]:
    from keras import layers, tree

    # Includes the outputs of models within the model.
    graphs = [part for part in model._flatten_layers() if hasattr(part, "outputs")]
    outputs = tree.flatten([graph.outputs for graph in graphs])
    given = {id(output._keras_history.operation) for output in outputs}
    for pool in list(calls):
        if type(pool) is not layers.MaxPooling2D or (pool.pool_size, pool.strides) != (_2X2, _2X2):
            continue
        if len(pool._inbound_nodes) != 1:
            continue
        (read,) = pool._inbound_nodes[0].input_tensors
        layer = read._keras_history.operation
        is_read_once = len(layer._inbound_nodes) == len(layer._outbound_nodes) == 1
        if id(layer) in given or layer not in calls:
            continue
        if is_read_once and _ends_in_relu(layer):
            yield layer, pool


_2X2 = (2, 2)


def _ends_in_relu(layer: Any) -> bool:
    from keras import activations, layers

    return type(layer) is layers.Conv2D and layer.activation is activations.relu


def _with_relu(call: Call) -> Call:
    def with_relu(inputs: torch.Tensor) -> torch.Tensor:
        if not _is_step():
            return call(inputs)
        return relu_pool(inputs.permute(0, 3, 1, 2), None, None, True).permute(0, 2, 3, 1)

    return with_relu
