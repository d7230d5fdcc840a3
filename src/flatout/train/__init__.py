"""Training: one step, Loop, Trainer, and the settings that `auto` decides.

The path of a step: trainer.py, fit.py, loop.py, feed.py, part.py, step.py. Around that path:

loop_state.py, prepare.py, decide.py, start_tuning.py: the state of a Loop, and Loop.prepare.
parts/: objects called Parts, which act around a step; order.py lists all Parts with reasons for
    their order; features/ keeps the outputs of frozen layers.
tuning/: tries open settings on a few samples and then on the job's steps.
graphs/: runs steps and evaluations as compiled graphs on a CPU, and steps as CUDA graphs.
tables/: embedding tables that are stepped by rows. sharded_tables.py, split_tables.py: on ranks.
losses/: losses, class weights and metrics; compute.py: forward and loss of a batch.
settings.py: switches a live model to settings and back.
turn.py: state of the optimizers that step together.
evaluate*.py, predict.py: evaluation and prediction, batch size measured.
model_ids.py, grow_tables.py: give tables of the model rows for the ids of the data.
guard.py: finds the cause of a NaN in gradients or weights.
checkpointing.py, resume/: write checkpoints, and resume from one.
counted.py, explanation.py: count the operators of a step; explain the speed of a fit.
recording.py, profiled.py: write the Profile of a run.
objective.py, keras/: the model, loss and optimizer that a Trainer trains; of Keras too.
callbacks/: callbacks of a fit. notebook/: a fit on ranks that a notebook spawns.
sections.py: divides an epoch among ranks that do not wait for each other.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
