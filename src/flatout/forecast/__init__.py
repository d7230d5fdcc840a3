"""The gain from more hosts, devices or money, with intervals, from measurements of runs.

profiled.py reads a job, its timed steps and the range of each unknown value from Profiles (job.py).
step.py is the model, with communication in collectives.py; calibrate.py fits it to the timed steps.
network.py holds a network, which measure_network.py measures by ranks that run probe.py.
forecast.py computes rate and cost of each number of hosts, and decisions.py derives
recommendations. bench/forecast_judge.py predicts published series; their errors set the width of
the intervals.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
