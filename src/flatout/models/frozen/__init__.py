"""The frozen prefix of a model: the part with the same result for a sample in each epoch.

A forward runs on stand-ins for its inputs, and each function and module that gets one is recorded
(`recording.py`). The recording shows which part is frozen and where it may be cut (`find.py`). A
cut runs the user's own forward in two parts (`cut.py`): one up to the kept values, one from there.
"""
