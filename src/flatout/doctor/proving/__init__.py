"""How cures are proven: what is tried, in which processes, and what their losses say.

cure.py        a cure, and those that a verdict's findings offer, in the order of trials
    bench.py       all trials of a script within one budget
jobs.py        the processes of a trial: the script as it is, or with cures
losses.py      whether two sides learn the same
whole_run.py   steps and time of the user's whole run
obstacles.py   why a script cannot be tried here
"""
