"""Clients: programs that people have drive a real server, and each asserts what its user sees.

`python -m tests.clients.install FOLDER` puts Python's clients, and with `--agents` the agents and the clients for Node,
into environments of their own. The variable CLIENTS names the folder; what is not there is skipped. Tests that need the
agents run with `-m agents`.
"""
