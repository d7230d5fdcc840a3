"""Settings under which a Trainer trains as a plain loop of torch does, on one thread."""

from flatout.recipe import Compute, Process, Recipe

PLAIN = Recipe(
    compute=Compute(
        precision="fp32",
        memory_format="contiguous",
        rewrites="off",
        fused_optimizer="off",
        compile="off",
        matmul_precision="highest",
    ),
    process=Process(threads=1),
)
