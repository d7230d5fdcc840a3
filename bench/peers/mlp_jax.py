"""JAX: forward, backward and Adam as one jitted step, or with --scan a whole epoch as one."""

from __future__ import annotations

import os
from functools import partial
from typing import NamedTuple

import mlp_job

# XLA sizes its pool by the CPUs that it may use, and dispatches from a thread beside it.
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from stamps import Stamps, report  # noqa: E402

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
Tensors = dict[str, jax.Array]


class State(NamedTuple):
    """The weights, Adam's two averages of their gradients, and the steps done."""

    weights: Tensors
    first: Tensors
    second: Tensors
    count: jax.Array


def start() -> State:
    """Weights and biases uniform as those of torch.nn.Linear."""
    random = np.random.default_rng(0)

    def uniform(inputs: int, *shape: int) -> jax.Array:
        bound = inputs**-0.5
        return jnp.asarray(random.uniform(-bound, bound, shape), jnp.float32)

    features, hidden, classes = mlp_job.FEATURES, mlp_job.HIDDEN, mlp_job.CLASSES
    weights = {
        "w1": uniform(features, features, hidden),
        "b1": uniform(features, hidden),
        "w2": uniform(hidden, hidden, classes),
        "b2": uniform(hidden, classes),
    }
    zeros = partial(jax.tree.map, jnp.zeros_like)
    return State(weights, zeros(weights), zeros(weights), jnp.zeros((), jnp.int32))


def forward(weights: Tensors, inputs: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(inputs @ weights["w1"] + weights["b1"])
    return hidden @ weights["w2"] + weights["b2"]


def loss_of(weights: Tensors, inputs: jax.Array, labels: jax.Array) -> jax.Array:
    chances = jax.nn.log_softmax(forward(weights, inputs))
    return -jnp.take_along_axis(chances, labels[:, None], axis=1).mean()


def train(state: State, inputs: jax.Array, labels: jax.Array, index: jax.Array) -> State:
    """A step of Adam, as torch computes it."""
    gradients = jax.grad(loss_of)(state.weights, inputs[index], labels[index])
    first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state.first, gradients)
    second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, state.second, gradients)
    count = state.count + 1
    rate = mlp_job.LEARNING_RATE / (1 - BETA1**count)
    scale = jnp.sqrt(1 - BETA2**count)
    weights = jax.tree.map(
        lambda w, m, v: w - rate * m / (jnp.sqrt(v) / scale + EPSILON),
        state.weights,
        first,
        second,
    )
    return State(weights, first, second, count)


@partial(jax.jit, donate_argnums=0)
def step(state: State, inputs: jax.Array, labels: jax.Array, order: jax.Array) -> State:
    """The next step: it finds its own batch, for a copy or a slice from Python would cost more."""
    return train(state, inputs, labels, order[state.count % len(order)])


@partial(jax.jit, donate_argnums=0)
def epoch(state: State, inputs: jax.Array, labels: jax.Array, order: jax.Array) -> State:
    return jax.lax.scan(
        lambda state, index: (train(state, inputs, labels, index), None), state, order
    )[0]


def main() -> None:
    arguments = mlp_job.arguments("--scan")
    inputs, labels = map(jnp.asarray, mlp_job.data(arguments.samples))
    steps = len(inputs) // mlp_job.BATCH  # whole batches: each other shape compiles another step
    random = np.random.default_rng(0)
    state = start()

    stamps = Stamps()
    for _ in range(1 + arguments.epochs):
        order = random.permutation(len(inputs))[: steps * mlp_job.BATCH]
        order = jnp.asarray(order.reshape(steps, mlp_job.BATCH))
        if arguments.scan:
            state = epoch(state, inputs, labels, order)
        else:
            for _ in range(steps):
                state = step(state, inputs, labels, order)
        jax.block_until_ready(state)
        stamps.mark()

    accuracy = float((forward(state.weights, inputs).argmax(1) == labels).mean())
    report(arguments.out, stamps, steps=steps, accuracy=accuracy)


if __name__ == "__main__":
    main()
