"""How cures are proven: what is tried, in which processes, and what their losses say.

cure.py        a cure, and those that a verdict's findings offer, in the order of trials
jobs.py        the processes of a trial: the script as it is, or with cures
bench.py       all trials of a script within one budget
losses.py      whether two sides learn the same
judging.py     what a trial says of a cure: prescribed, or left alone and why
follow.py      what a cure brings about
whole_run.py   steps and time of the user's whole run
obstacles.py   why a script cannot be tried here
"""
