"""Trials: a user's unmodified script, run twice and compared, without harm to the user's data.

    pair.py        two live processes of the script, measured block by block: A B B A
    schedule.py    length and number of the blocks
    step_sync.py   in the script: a process waits at the end of a step until it may go on
    supervisor.py  parent of one such process: contains it, stops it, ends all its children
    apart.py       below the supervisor: own processes and network of the script, if the kernel
    namespaces.py  has namespaces; own_network.py: what that network has of this machine's;
    relay.py       connections from there to the services of this machine
    contained.py   first actions of every Python process below a supervisor
    overlay.py     files copied on write by the kernel, if the kernel allows it
    landlock.py    otherwise the kernel refuses writes outside the scratch folder,
    redirect.py    and Python's file functions write there instead: view.py and native_files.py
                   know the paths, native_writers.py the native code
    guard.py       ends the trial at a connection of Python's to elsewhere, or at a write that
                   was not redirected
    scratch.py     the folders, and the remains of trials that were killed
    offline.py     keeps loggers and hubs offline
    network.py     what a script would send elsewhere, read from its code in advance

This file imports nothing: contained.py runs at the start of each process of a trial.
"""
