"""The same with a Ray actor that holds the weights, as Ray's own parameter server example does."""

from __future__ import annotations

import numpy as np
import ray
import servers_job
from ray.cluster_utils import Cluster


@ray.remote(num_cpus=1, resources={"servers": 1})
class Server:
    def __init__(self, numbers: int) -> None:
        self.weights = np.zeros(numbers, dtype=np.float32)

    def step(self, gradient: np.ndarray) -> np.ndarray:
        self.weights -= servers_job.RATE * gradient
        return self.weights


def main() -> None:
    asked = servers_job.arguments()
    # Two nodes have each their own memory of objects, and send them through sockets.
    cluster = Cluster()
    cluster.add_node(num_cpus=1, resources={} if asked.sockets else {"servers": 1})
    if asked.sockets:
        cluster.add_node(num_cpus=1, resources={"servers": 1})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    numbers = asked.megabytes << 18
    server = Server.remote(numbers)
    gradient = np.ones(numbers, dtype=np.float32)
    servers_job.measure(asked, lambda: float(ray.get(server.step.remote(gradient))[0]))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
