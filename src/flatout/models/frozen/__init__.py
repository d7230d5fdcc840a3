"""The frozen prefix of a model: the part with the same result for a sample in each epoch.

A cut splits a forward into this prefix and the rest. The outputs of the prefix, called kept values,
are stored for each sample. A stand-in is a tensor whose calls are recorded. A forward runs on
stand-ins for its inputs, and each function and module that gets a stand-in is recorded
(`recording.py`). The recording shows which calls are frozen and where the forward may be cut
(`find.py`). A cut then runs the user's own forward in two parts (`cut.py`): up to the kept values,
and from the kept values on.
"""
