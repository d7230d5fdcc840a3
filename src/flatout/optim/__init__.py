"""The optimizer step: gated against bad numbers, fused where that is allowed; large batches.

adapter.py finds the framework of an optimizer, torch_optimizer.py answers for torch's, and
models/keras/optimizer.py makes one of torch's of Keras'. update.py makes the step, update_cost.py
estimates its time; fused.py switches to fused kernels and back. touched_rows.py steps tables by
the rows that a batch has used: row_rules.py has the formulas, row_shards.py the owners of rows,
by_row.py optimizers in which unused rows stand still. late_group.py adds a parameter group under
a schedule.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
