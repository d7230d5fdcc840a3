"""Runs a script whose trial meets it at step boundaries: `python stepping.py script.py args`."""

import runpy
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.doctor.trials.step_sync import at_step

register_optimizer_step_post_hook(lambda *_: at_step())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
