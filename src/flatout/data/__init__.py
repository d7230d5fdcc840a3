"""Input: a user's data become batches in an order that depends on the seed and epoch alone.

Names load lazily, because torch is not needed before the first name is used.

A user writes a Pipeline (pipeline.py): a source and stages. planner.py builds its program, and
explains why the program gives the same batches. source.py is the interface to training.

    sources/       a file per format, which offers Rows by index, Chunks, or a Stream
    reading/       what formats share: schema, blocks of rows, files, an index of the rows' starts
    stages/        a file per stage: its method, and its effect on rows, their order and a stream
    execution/     runs the program: batch_sampler.py chooses the rows of a batch, samples.py makes
                   samples of rows, program.py makes batches of samples
    workers/       threads and processes that make batches ahead; prefetch.py copies to a device
    batches/       batches of tensors, also without a row per sample (jagged_batch.py)
    stores/        decoded rows in memory or in a folder
    features/      the output of frozen layers, by sample (device_rows.py: on a GPU too)
    ids/           maps ids to rows of a table; names of classes
    augmentation/  draws the changes of `augment`, which kernels/augment/ applies
    digests/       digests of data and of a user's code
    conversion/    `flatout data convert`
    inspection/    `flatout data inspect`
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
