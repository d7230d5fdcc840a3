"""Diagnosis of a training job: what slows or endangers it, and how to fix that.

report/session.py takes a script through it. first_look.py runs the script under observation;
checks/ has a file per check, which makes Findings of Observations, or raises NoSignal; judge.py
makes a Verdict of them, over all ranks. edits/ are changes of the user's code, proposals.py the
one that a finding names. prove.py and proving/ try each cure, then the winners together: a
Prescription. trials/pair.py measures two contained processes block by block, verify.py compares
whole runs over several seeds. machine.py is flatout doctor alone. Each process of a trial has a
supervisor (trials/supervisor.py), which contains it, stops it between its blocks, and ends it
when the trial's end of its pipe closes; the script dies with its supervisor (PR_SET_PDEATHSIG).
Files are copied on write, by the kernel (overlay.py), else by landlock.py and redirect.py.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
