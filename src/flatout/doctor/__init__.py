"""Diagnosis of a training job: what slows or endangers it, and how to cure that.

report/session.py calls the parts of this room in order. For `flatout doctor` without a script it is
machine.py alone.

first_look.py      runs a script under observation.
checks/            one file per check, which makes Findings from Observations or raises NoSignal.
judge.py           makes a Verdict from the findings of all ranks.
proposals.py       writes the edits of the user's code that a finding asks for, by edits/.
prove.py           tries each cure, then the winners together: a Prescription, by proving/.
trials/pair.py     measures two contained processes of the script block by block.
verify.py          compares whole runs of several seeds.

Each process of a trial has a supervisor (trials/supervisor.py), which contains it, and stops it
between its blocks. It ends the process when the trial's end of their pipe closes. The script dies
with its supervisor (PR_SET_PDEATHSIG). Files are copied on write: by the kernel (overlay.py), or
else by redirect.py, with landlock.py against other writes.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
