"""Input: a user's data become batches in an order that depends on the seed and epoch alone.

Names load lazily, because torch is not needed before the first name is used.

A user writes a Pipeline (pipeline.py): a source and stages. sources/ has a file per format, which
offers Rows by index, Chunks, or a Stream (origins.py). stages/ has a file per stage: its method,
and its effect on rows, their order and a stream. planner.py builds the program of a pipeline, and
explains why it gives the same batches. execution/ runs the program: batch_sampler.py chooses the
rows of a batch, samples.py makes samples of rows, program.py makes batches of samples, on threads
(parallel.py) or processes (process_pool.py); prefetch.py copies them to the device. changed.py
reports the values that reading changes. turns.py counts the uses of a row in an epoch. claims.py
assigns parts of batches to ranks that do not wait for each other. featured.py uses stored features.
source.py is the interface to training. tensors.py makes batches from the output of loaders, also
without a row per sample (jagged_batch.py, objects.py). order.py is the order of samples, a pure
function. features/ keeps the output of frozen layers, by sample (device_rows.py: on a GPU too).
ids/ maps ids to rows of a table. augmentation.py and resized_crop.py draw the changes of `augment`,
and kernels/augment/ applies them. conversion/ and inspection/ implement `flatout data convert`
and `flatout data inspect`.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
