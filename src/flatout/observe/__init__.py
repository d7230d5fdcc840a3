"""Instrumenting any script: where its time goes, and what it does that costs or endangers.

`python -m flatout.observe.start FOLDER script.py args` runs a script as it is and leaves an
Observation of each rank in the folder.

start.py is the command, run_script.py runs the script as python would, watch.py holds what all
hooks fill in, lanes.py and quick.py are the clock. observation.py is the result as plain data:
the contract with the doctor. A file per kind of thing that is seen. line_sampler.py lets a native
thread (kernels/_stacks.c) look at running frames, stacks.py and lines.py make lines of that,
origins.py finds the lines that make a batch, other_threads.py watches other threads,
module_times.py times modules, device_time.py a GPU. cost.py counts what observing adds. Where
nothing of a run is kept, ablation.py takes lanes and calls out of its steps, and lapse.py ends
its epochs early, by conditions that rewriting.py compiles into the user's files; unused_calls.py
and side_effects.py say which calls may be left out.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
