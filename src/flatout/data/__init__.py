"""Input: whatever a user hands over becomes batches in an order that is a function.

Names load lazily, because torch is not needed before the first of them is.

A user writes a Pipeline (pipeline.py): a source and stages. sources/ has a file per format, which
offers Rows by number, Chunks, or a Stream (origins.py); stages/ a file per stage: its method, and
what it does to rows, their order and a stream. planner.py asks them what runs, and why that gives
the same batches. execution/ runs it: batch_sampler.py chooses the rows of a batch, samples.py
makes samples of rows, program.py batches of samples, on threads (parallel.py) or processes
(process_pool.py); prefetch.py copies them to the device. changed.py reports the values that
reading changes. turns.py counts the uses of a row in an epoch. claims.py assigns parts of batches
to ranks that do not wait for each other. featured.py uses kept features. source.py is the
interface to training; tensors.py makes batches from the output of loaders, also without a row per
sample (jagged_batch.py, objects.py); order.py is the order of samples, a pure function. features/
keeps what frozen layers gave, by sample (device_rows.py: on a GPU too); ids/ maps ids to rows of
a table. augmentation.py and resized_crop.py draw what augment does to images, kernels/augment.py
does it. conversion/ and inspection/ are flatout data convert and inspect.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
