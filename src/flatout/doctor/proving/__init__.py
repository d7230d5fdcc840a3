"""Trials of cures: the cures to try, the processes to run, and how to compare their losses.

cure.py:       a cure, and the cures that a verdict's findings offer, in the order of trials
jobs.py:       the processes of a trial: the script as it is, or with cures
bench.py:      all trials of a script within one budget
losses.py:     whether two sides learn the same
judging.py:    the outcome of a trial: the cure is prescribed, or left alone and why
follow.py:     problems that a cure causes
whole_run.py:  steps and time of the user's whole run
obstacles.py:  why a script cannot be tried here
"""
