"""The frozen prefix of a model: what gives the same for a sample in each epoch.

A forward is run on stand-ins for its inputs, and each function and module that they reach is noted
(`recording.py`). From that follows what is frozen and where it may be cut (`find.py`). A cut runs
the user's own forward in two parts (`cut.py`): once up to what is kept, once from there.
"""
