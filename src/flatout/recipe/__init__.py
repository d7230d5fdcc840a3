"""The Recipe: all settings that decide how fast a job runs, as requested and as resolved.

settings/ has one file per section, in which each setting is declared once (see setting.py).
recipe.py has the two types of Recipe. overrides.py decides which value applies: that of --set, else
of the code, else of --recipe, else auto. The reference documentation is made from the declarations.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
