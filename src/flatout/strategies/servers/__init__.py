"""Parameter servers: the weights are cut into shares, and each server steps one for all ranks.

A server is a process of its own, or a thread of one of the first ranks. It waits for the gradients
of all ranks (`synchronous.py`), or steps with each gradient that comes (`asynchronous.py`).

    parameter_server.py   a rank's side, for both;  routes.py: its memory for gradients and weights
    layout.py             which server has which numbers;  runs.py: how it steps them
    process.py            a server's side;  link.py: what the two sides send
    share.py, server.py   what a server holds, and how it steps without waiting
"""
