"""The Recipe: every setting that decides how fast a job runs, asked for and resolved.

settings/ has a file per section, which declares each setting once (setting.py says with what).
recipe.py has the two types of Recipe, overrides.py which one holds: --set over code over --recipe
over auto. The reference is made from the declarations.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
