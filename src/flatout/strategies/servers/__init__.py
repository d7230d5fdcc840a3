"""Parameter servers: the weights are cut into shares, and each server steps one for all ranks.

A server is a process of its own, or a thread of one of the first ranks. It waits for the gradients
of all ranks (`synchronous.py`), or steps with each gradient that arrives (`asynchronous.py`).

    parameter_server.py   a rank's side, for both;  routes.py: its memory for gradients and weights
    layout.py             the values that each server has;  runs.py: their steps
    process.py            a server's side;  link.py: the messages between the two sides
    share.py, server.py   a server's values, and its steps without waiting
"""
