"""Training: one step, Loop, Trainer, and the settings that `auto` decides.

The path of a step: trainer.py, fit.py, loop.py, feed.py, part.py, step.py. Around that path:

loop_state.py, prepare.py, decide.py: the state of a Loop, and the steps of Loop.prepare.
parts/: objects called Parts, which act around a step; order.py lists all Parts with reasons for
    their order.
graphs.py, sample_dropout.py, tuner.py, stragglers.py: further Parts, which other files use too.
turn.py: state of the optimizers that step together. loss_value.py: a loss as (sum, weight).
auto*.py, tuner.py, tuning.py, rehearsal.py, lengths.py: try open settings on a few samples and
    then on the job's steps; choose by batch length where lengths differ.
settings.py: switches a live model to settings and back.
row_tables.py, split_tables.py, sharded_tables.py: embedding tables that are stepped by rows.
features.py, frozen_*.py, feature_*.py, named_rows.py: keep the outputs of frozen layers.
capture*.py, captured_steps.py: run steps as one compiled graph on a CPU.
cuda_graph*.py, function_watch.py: run steps as CUDA graphs.
evaluate*.py, forward_graph.py, predict.py: evaluation and prediction, batch size measured.
model_ids.py, grow_tables.py: give tables of the model rows for the ids of the data.
guard.py: finds the cause of a NaN in gradients or weights.
checkpointing.py, resume.py, same_job.py: write checkpoints, and resume from one.
counted.py, explanation.py: count the operators of a step; explain the speed of a fit.
recording.py, profiled.py: write the Profile of a run.
objective.py, compiled.py: the model, loss and optimizer that a Trainer trains; of Keras too.
notebook*.py: a fit on ranks that a notebook spawns.
sections.py: divides an epoch among ranks that do not wait for each other.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
