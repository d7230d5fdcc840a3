from flatout.train.explanation import Explanation as Explanation
from flatout.train.explanation import words_of as words_of
from flatout.train.held_state import HeldState as HeldState
from flatout.train.history import History as History
from flatout.train.history import json_safe as json_safe
from flatout.train.snapshot import random_state as random_state
from flatout.train.snapshot import set_random_state as set_random_state
from flatout.train.trainer import Trainer as Trainer
