"""The options of the public API: how each is declared, once, and how a call's arguments are checked.

Keyword forms, options of the command line, fields of requests to the server, hints for names of other
programs and tables of the docs are made of these declarations. Nothing here imports PyTorch.
"""

from foredraft.arguments.declaration import (
    Declared,
    check_fields,
    clear_calls,
    declared,
    option,
    spelled_elsewhere,
    takes_fields_of,
)

__all__ = [
    "Declared",
    "check_fields",
    "clear_calls",
    "declared",
    "option",
    "spelled_elsewhere",
    "takes_fields_of",
]
