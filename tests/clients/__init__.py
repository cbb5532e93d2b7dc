"""Clients: programs that people have drive a real server, and each asserts what its user sees.

`python -m tests.clients.install FOLDER` puts Python's clients into an environment of their own, because their pinned
versions need not agree with those of the tests; with `--agents` it also installs aider, and with npm Claude Code,
Codex CLI, opencode, the AI SDK and OpenAI's client for Node. The variable CLIENTS names the folder; what is not there
is skipped. Tests that need the agents have the mark `agents` and run with `-m agents`.
"""
