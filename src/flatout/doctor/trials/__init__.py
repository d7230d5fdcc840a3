"""Trials: a user's unmodified script, run twice and compared, without harm to anything of theirs.

    pair.py        two live processes of the script, measured block by block: A B B A
    schedule.py    how long its blocks are, and how many of them there are
    step_sync.py   in the script: where a step ends, a process waits until it may go on
    supervisor.py  the parent of one such process: contains it, stops it, ends all that it began
    apart.py       below it, where the kernel has namespaces: processes and network of the script's
    namespaces.py  own; what that network has of this machine's (own_network.py), and how the
    relay.py       services of this machine are reached from there
    contained.py   what every Python process below a supervisor does first
    overlay.py     files copied on write by the kernel, where it allows that
    landlock.py    elsewhere: the kernel refuses to write outside the scratch folder,
    redirect.py    and Python's file functions write there instead: what view.py and
                   native_files.py know of paths, native_writers.py of native code
    guard.py       connections of Python's to elsewhere, and writes that nothing redirected, end
                   the trial
    scratch.py     the folders, and what is left of trials that were killed
    offline.py     loggers and hubs stay offline
    network.py     what a script would send elsewhere, read from its code in advance

Nothing is imported here: contained.py runs at the start of each process of a trial.
"""
