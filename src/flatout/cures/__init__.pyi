from flatout.cures.install import UNDO as UNDO
from flatout.cures.install import install as install
from flatout.cures.install import wanted as wanted
from flatout.cures.record import applied as applied
from flatout.cures.record import is_full as is_full
from flatout.cures.record import left as left
from flatout.cures.record import words_of as words_of
