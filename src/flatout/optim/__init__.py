"""The optimizer step: gated against bad numbers, fused if possible; rules for large batches.

adapter.py selects the adapter of an optimizer's framework: torch_optimizer.py for torch,
models/keras/optimizer.py for Keras. update.py makes the step, and update_cost.py estimates its
time. fused.py switches to fused kernels and back. touched_rows.py steps tables by the rows that a
batch has used: row_rules.py has the formulas, row_shards.py the owners of rows, by_row.py
optimizers in which unused rows stay as they are. late_group.py adds a parameter group under a
schedule.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
