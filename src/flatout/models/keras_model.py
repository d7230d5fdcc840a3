"""Keras models: what they are, and what keeps them from being trained here.

Keras itself is imported nowhere before the user has imported it: which backend it takes is decided
at that moment.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any

from flatout.errors import ModelError

_FOREIGN = {"tensorflow": "TensorFlow", "jax": "JAX"}


def is_keras(model: object) -> bool:
    """Whether `model` is a `keras.Model`, on whatever backend."""
    keras = sys.modules.get("keras")
    kind = getattr(keras, "Model", None)
    return kind is not None and isinstance(model, kind)


def check_trainable(model: Any) -> None:
    """Refuse a Keras model that torch cannot train, with the reason.

    Raises:
        ModelError: Keras runs on another backend, or a layer calls TensorFlow or JAX.
    """
    keras: Any = sys.modules["keras"]
    backend = keras.backend.backend()
    if backend != "torch":
        raise ModelError(
            f"Keras runs on {backend} in this process, and Flatout trains on Keras' torch backend",
            do="set KERAS_BACKEND=torch before Keras is imported: in the shell, by "
            "os.environ['KERAS_BACKEND'] = 'torch' at the top of the script, or by starting it "
            "with `flatout run`. A .keras file that another backend saved loads there as it is",
        )
    for layer in model._flatten_layers():
        found = next(_foreign_calls(layer), None)
        if found is not None:
            words, where = found
            raise ModelError(
                f"layer {layer.name!r} ({type(layer).__name__}) calls {words}, which torch cannot "
                "differentiate",
                where=where,
                do="write it with keras.ops, which run on every backend",
            )


def _foreign_calls(layer: Any) -> Iterator[tuple[str, str]]:
    """Calls of TensorFlow or JAX in the user's code of a layer: in words, and file:line."""
    functions = [
        function
        for cls in type(layer).__mro__
        if not cls.__module__.startswith(("keras.", "torch.", "builtins"))
        for function in vars(cls).values()
        if isinstance(function, FunctionType)
    ]
    own = getattr(layer, "function", None)  # of a Lambda layer
    if isinstance(own, FunctionType):
        functions.append(own)
    for function in functions:
        yield from _foreign_calls_in(function)


def _foreign_calls_in(function: FunctionType) -> Iterator[tuple[str, str]]:
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return  # typed at a prompt, or a lambda within a call: nothing to read
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name):
            continue
        framework = _framework(function.__globals__.get(root.id))
        if framework is not None:
            where = f"{inspect.getsourcefile(function)}:{first + node.lineno - 1}"
            yield f"{ast.unparse(node)} of {framework}", where


def _framework(value: object) -> str | None:
    if not isinstance(value, ModuleType):
        return None
    return _FOREIGN.get(value.__name__.partition(".")[0])


def has_own_step(model: Any) -> bool:
    """Whether the user's class says itself what a training step is."""
    return not type(model).train_step.__module__.startswith("keras.")


def is_batch_coupled(model: Any) -> bool:
    """Whether a layer takes statistics over the batch."""
    return any(
        type(layer).__name__ == "BatchNormalization" and layer.trainable
        for layer in model._flatten_layers()
    )


def modules_of(model: Any) -> list[Any]:
    """All modules of a model, each once; also the layers that Keras keeps in lists of its own."""
    found: dict[int, Any] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) in found:
            continue
        found[id(module)] = module
        waiting.extend(module.children())
        if hasattr(module, "_flatten_layers"):
            waiting.extend(module._flatten_layers(include_self=False, recursive=False))
    return list(found.values())


def draws_random(model: Any) -> bool:
    """Whether a training step draws random numbers inside the model."""
    return any(layer._seed_generators for layer in model._flatten_layers())


def scales_images(model: Any) -> bool:
    """Whether a layer of the model scales or normalizes what it gets, as `Rescaling` does."""
    keras: Any = sys.modules["keras"]
    kinds = (keras.layers.Rescaling, keras.layers.Normalization)
    return any(isinstance(layer, kinds) for layer in model._flatten_layers())


def takes_channels_last(model: Any) -> bool:
    """Whether its images are of shape (size, height, width, channels): by its layers, or Keras."""
    keras: Any = sys.modules["keras"]
    formats = (getattr(layer, "data_format", None) for layer in model._flatten_layers())
    own = next((found for found in formats if found is not None), None)
    return bool((own or keras.config.image_data_format()) == "channels_last")


@contextmanager
def watching(layer: Any, look: Callable[[Any, tuple[Any, ...], Any], None]) -> Iterator[None]:
    """Have `look(layer, inputs, output)` called after each call of a layer.

    Keras layers are torch modules, but their calls pass torch's hooks by.
    """
    before, call = vars(layer).get("call"), layer.call

    @wraps(call)
    def watched(*inputs: Any, **options: Any) -> Any:
        output = call(*inputs, **options)
        look(layer, inputs, output)
        return output

    vars(layer)["call"] = watched
    try:
        yield
    finally:
        if before is None:
            del vars(layer)["call"]
        else:
            vars(layer)["call"] = before


def variables_of(model: Any) -> list[Any]:
    """Everything that a step may change of a model: weights, statistics, seeds, states.

    Keras lists all but the states of stateful recurrent layers.
    """
    listed = [variable for variable in model.variables if variable._value is not None]
    known = {id(variable) for variable in listed}
    states = [
        state
        for layer in model._flatten_layers()
        for state in _flat(getattr(layer, "states", None))
        if hasattr(state, "assign") and id(state) not in known
    ]
    return [*listed, *states]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)
    elif value is not None:
        yield value


def structure(model: Any) -> str:
    """The model's layers and options as text: two models with the same text compute the same."""
    try:
        return str(model.to_json())
    except Exception:  # a layer without a config: what there is to tell are its class and weights
        kinds = [type(layer).__qualname__ for layer in model._flatten_layers()]
        return " ".join([type(model).__qualname__, *kinds])
