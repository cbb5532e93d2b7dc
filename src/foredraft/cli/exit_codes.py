"""Exit codes of every command."""

__all__ = ["FAILED", "INCONCLUSIVE", "INTERRUPTED", "USER_ERROR"]

FAILED = 1  # generation failed, or tokens differ from plain decoding
USER_ERROR = 2  # a wrong option, model or request
INCONCLUSIVE = 3  # `verify` found no difference, but its tests were too weak
INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT
