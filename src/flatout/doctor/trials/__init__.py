"""Trials: a user's unmodified script, run twice and compared, without harm to the user's data.

    pair.py:            two live processes of the script, measured block by block: A B B A.
    schedule.py:        length and number of the blocks.
    step_sync.py:       in the script: a process waits at the end of a step until it may go on.
    supervisor.py:      parent of one such process: contains it, stops it, ends all its children.
    apart.py:           below the supervisor: own processes and network of the script.
    namespaces.py:      the kernel's namespaces, which apart.py needs.
    own_network.py:     the addresses and services of this machine within that network.
    relay.py:           connections from that network to the services of this machine.
    contained.py:       first actions of every Python process below a supervisor.
    overlay.py:         files that the kernel copies on write, if it allows overlays.
    landlock.py:        otherwise: the kernel refuses writes outside the scratch folder.
    redirect.py:        then Python's file functions write to the scratch folder instead.
    view.py:            the paths to which redirect.py leads, with native_files.py.
    native_writers.py:  the same for native code.
    guard.py:           ends a trial that connects to elsewhere, or writes without redirection.
    scratch.py:         the folders, and the remains of trials that were killed.
    offline.py:         keeps loggers and hubs offline.
    network.py:         finds what a script would send elsewhere, in its code, in advance.

This file imports nothing: contained.py runs at the start of each process of a trial.
"""
