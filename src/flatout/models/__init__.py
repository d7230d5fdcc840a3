"""Facts about models, and changes that do not alter a model's result.

adapter.py selects the adapter of a model's framework: torch_model.py or keras/model.py. All uses of
Keras' internals are in keras/. frozen/ finds the best place to split a forward into frozen layers
and the rest (min_cut.py), and runs these two parts separately. rewrites.py finds exact rewrites by
torch.fx. fused_norms.py has one kernel for BatchNorm and ReLU. fp32_operators.py keeps operators in
fp32 that are slower in bf16. freezing.py has flatout.freeze, and hold.py keeps a frozen module in
evaluation. operators.py counts the operators of a step.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
