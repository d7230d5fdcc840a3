"""The section `compute`: how the arithmetic of a step runs."""

from typing import Literal

from flatout.recipe.parity import ModelFacts, Parity, redrawn_if
from flatout.recipe.setting import Flag, Live, Section, Switch, Trial, setting


def _precision(facts: ModelFacts) -> Parity:
    # On a GPU, torch fills a random mask in half precision in another order.
    draws = facts.draws_from_a_stream and facts.device.startswith("cuda")
    return redrawn_if(draws, Parity.TOLERANT)


def _memory_format(facts: ModelFacts) -> Parity:
    # Other kernels round differently, and torch fills a random mask in memory order.
    return redrawn_if(facts.draws_from_a_stream and facts.draws_by_layout, Parity.TOLERANT)


class Compute(Section):
    """How the arithmetic of a step runs."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = setting(
        "auto",
        "The number format of the heavy operators under autocast. Weights and the optimizer stay "
        "in fp32. fp16 scales the loss and skips a step whose gradients overflow.",
        plain="fp32",
        parity=_precision,
        words="{}",
        trial=Trial(
            "bf16", lambda job: job.could_use_bf16, why="bf16 units are there", by_size=False
        ),
        live=Live(in_features=True),
    )
    fp32_operators: Switch = setting(
        "auto",
        "Under bf16, the operators that a CPU may run slower in bf16 stay in fp32: attention, and "
        "depthwise convolutions with a stride.",
        plain="off",
        parity=Parity.TOLERANT,
        words="fp32 operators",
        trial=Trial(
            "on",
            lambda job: job.may_be_slower_in_bf16,
            why="their bf16 kernels may be slower",
            by_size=False,
        ),
        live=Live(lambda at, value: at.keep_in_fp32(), layer=4, in_features=True),
    )
    memory_format: Literal["auto", "contiguous", "channels_last"] = setting(
        "auto",
        "The layout of image tensors: NCHW, or NHWC with the same shape.",
        plain="contiguous",
        parity=_memory_format,
        words="{}",
        trial=Trial(
            "channels_last",
            lambda job: job.has_convolutions,
            why="convolutions read it in order",
            by_size=False,
        ),
        live=Live(
            lambda at, value: at.lay_out(value),
            now=lambda at: at.memory_format,
            switches="seldom",
            in_features=True,
        ),
    )
    rewrites: Switch = setting(
        "auto",
        "Rewrites of the model's graph that give equal values, such as a ReLU moved after "
        "max-pooling.",
        plain="off",
        # Keras' layers add their bias within the operator, which rounds differently.
        parity=lambda facts: Parity.TOLERANT if facts.rewrites_round else Parity.EXACT,
        words="rewrites",
        trial=Trial("on", lambda job: job.has_rewrites, why="less memory traffic"),
        live=Live(lambda at, value: at.rewrite(), layer=2),
    )
    fused_norms: Switch = setting(
        "auto",
        "BatchNorm in training with the ReLU after it, and a residual block's sum between them, "
        "as one operator with fewer passes over memory, on a CPU.",
        plain="off",
        parity=Parity.TOLERANT,
        words="fused norms",
        trial=Trial("on", lambda job: job.has_fused_norms, why="less memory traffic"),
        live=Live(lambda at, value: at.fuse_norms(), layer=3, in_features=True, in_graph=False),
    )
    fused_optimizer: Switch = setting(
        "auto",
        "One pass over each parameter for the optimizer's whole update.",
        plain="off",
        parity=Parity.TOLERANT,
        words="fused optimizer",
        trial=Trial("on", lambda job: job.can_fuse, why="one kernel for the whole update"),
        live=Live(
            lambda at, value: at.fuse(value == "on"),
            now=lambda at: "on" if at.is_fused else "off",
            may_change=True,
            in_passes=False,
        ),
    )
    touched_rows: Switch = setting(
        "auto",
        "Adam, AdamW, SGD, RMSprop and Adagrad step only the rows of an embedding table that a "
        "batch has used. This holds for tables on a CPU (`nn.Embedding`, `nn.EmbeddingBag`, Keras' "
        "`Embedding`, float32). On a GPU a dense step is faster. Before a row is read, it catches "
        "up on the steps that it missed. Before code reads a whole table, all rows do. So the "
        "result is that of the dense optimizer of torch or Keras. Ids that index a table's weight "
        "look up rows, too. A table that the loss reads whole is stepped whole. If the loss reads "
        "a table for L2, a line names the `weight_decay` that is the same but for clipping. A "
        "table is also stepped whole if a hook may read its gradient, on the table or around the "
        "optimizer's step. `auto`: taken if tables have many more rows than a batch has ids, tried "
        "if they have more.",
        plain="off",
        parity=Parity.TOLERANT,
        words="touched rows only",
        trial=Trial(
            "on", lambda job: job.has_large_tables, why="a batch reads few of the tables' rows"
        ),
        live=Live(lambda at, value: at.touch_rows(), layer=6, in_graph=False),
    )
    bf16_tables: Literal["rounded", "split"] = setting(
        "rounded",
        "How tables of embeddings of torch's modules that are bfloat16 are stepped. `rounded`: by "
        "their optimizer, which rounds weights and its state to 8 bits in each step, so that small "
        "steps are lost. `split`: by `compute.touched_rows`, which this turns on, as if they were "
        "float32: weights and state are the upper halves of float32 numbers, whose lower halves "
        "lie in the optimizer's state (`weight_lower_half` and others). Forward reads the upper "
        "halves, and the gradient is bfloat16. On one rank, or with world.strategy=ddp and "
        "replicated tables.",
        parity=Parity.LEARNING,
        words="bf16 tables: {}",
    )
    compile: Switch = setting(
        "auto",
        "torch.compile, for runs long enough to repay the compilation.",
        plain="off",
        # Inductor draws random numbers from its own streams.
        parity=lambda facts: redrawn_if(facts.draws_random, Parity.TOLERANT),
        words="torch.compile",
        trial=Trial("on", lambda job: job.can_compile),
        live=Live(lambda at, value: at.compile(), layer=5, switches="once", in_graph=False),
    )
    capture: Switch = setting(
        "auto",
        "Forward, backward and update as one compiled graph, on a CPU and one rank: for small "
        "models, whose steps are mostly calls. Also the forward of `evaluate`, `predict` and "
        "validation, of any model. It is compiled by another process meanwhile, and kept for later "
        "runs. `auto`: where what is left of the run repays that, and only where it is measured "
        "faster.",
        plain="off",
        parity=Parity.TOLERANT,
        words="captured step",
        live=Live(switches="once"),
    )
    cuda_graph: Switch = setting(
        "auto",
        "Forward and backward of a step as one CUDA graph, on one rank: a GPU gets all their "
        "kernels in one call, where a small model's step is mostly calls. The update of a small "
        "model with a fused optimizer at constant rates is part of it. The graph is recorded for "
        "each shape of batches that comes again, of up to eight, and compared with a step without "
        "it once; where code of the step waits for the GPU or draws random numbers on the CPU, "
        "steps run without.",
        plain="off",
        # The graph runs the same kernels on the same numbers, with the same random numbers.
        parity=Parity.EXACT,
        words="CUDA graph",
        trial=Trial(
            "on", lambda job: job.can_graph, why="one call for many kernels", by_size=False
        ),
        live=Live(in_passes=False),
    )
    cudnn_benchmark: Switch = setting(
        "auto",
        "cuDNN tries the algorithms of a convolution out for each new shape, and takes the fastest "
        "(torch.backends.cudnn.benchmark).",
        plain="off",
        # Other algorithms sum in another order.
        parity=Parity.TOLERANT,
        words="cuDNN benchmark",
        trial=Trial(
            "on",
            lambda job: job.has_cudnn_choices,
            why="faster algorithms for these shapes",
            by_size=False,
        ),
        live=Live(
            lambda at, value: at.benchmark_cudnn(value == "on"),
            now=lambda at: "on" if at.torch.backends.cudnn.benchmark else "off",
            switches="seldom",
            # Any algorithm gives right results, and testing it on a few samples takes a second.
            in_passes=False,
        ),
        unmeasured=lambda at: (at.now.cudnn_benchmark, "plain"),
    )
    matmul_precision: Literal["auto", "highest", "high", "medium"] = setting(
        "auto",
        "How precisely fp32 matrix products are computed (torch.set_float32_matmul_precision).",
        plain="highest",
        parity=Parity.TOLERANT,
        words="matmul {}",
        trial=Trial("high", lambda job: job.has_tf32_units, why="TF32 units are there"),
        live=Live(
            lambda at, value: at.torch.set_float32_matmul_precision(value),
            now=lambda at: at.matmul_precision(),
        ),
        unmeasured=lambda at: (at.now.matmul_precision, "plain"),
    )
    dropout: Literal["torch", "by_sample"] = setting(
        "torch",
        "What decides which elements dropout drops. `torch`: torch's own stream of random "
        "numbers, one on each rank. `by_sample`: seed, step, layer and sample alone, so that they "
        "are the same on any number of ranks, in any micro-batches and memory format, and after a "
        "resume; not with `compile`.",
        parity=lambda facts: redrawn_if(facts.draws_random, Parity.EXACT),
        words="dropout {}",
    )
    deterministic: Flag = setting(
        False,
        "Only operators that give the same bits on every run.",
        parity=Parity.TOLERANT,
        words="deterministic",
    )
