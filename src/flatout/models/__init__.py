"""What a model is to Flatout: facts about it, and changes that leave its result alone.

adapter.py finds the framework of a model; torch_model.py and keras/model.py answer all else, and
all that is private to Keras is in keras/. frozen/ finds where a forward is best cut after its
frozen layers (min_cut.py) and runs its two parts; rewrites.py finds exact rewrites by torch.fx.
fused_norms.py is one kernel for BatchNorm and ReLU, fp32_operators.py keeps in fp32 what is
slower in bf16. freezing.py is flatout.freeze, hold.py keeps a frozen module in evaluation,
operators.py counts what a step computes and moves.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
