"""The one exception tree.

    ForedraftError
    ├── ConfigError       an option of `load` or of the command line is wrong
    ├── CheckpointError   a folder is not a checkpoint, or one that cannot be run exactly
    └── RequestError      one request is wrong or failed; others go on

A message is one line that names the offending value and the remedy.
"""

__all__ = ["CheckpointError", "ConfigError", "ForedraftError", "RequestError"]


class ForedraftError(Exception):
    """Base of every error that a user of this package can cause or must handle."""


class ConfigError(ForedraftError):
    """An option has a value that cannot be honoured."""


class CheckpointError(ForedraftError):
    """A model folder is missing, broken, or needs mathematics that is not supported."""


class RequestError(ForedraftError):
    """A request cannot be served, or failed while it was."""
