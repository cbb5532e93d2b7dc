"""The options of the public API: how each is declared, once, and how a call's arguments are checked.

    values.py       which values an option takes
    declaration.py  an option's one declaration, and what is made of it: checks, help, names of other programs
    calls.py        calls that do not fit a signature; functions that take the fields of a dataclass

`SamplingParams` (decode/params.py) and `LoadOptions` (kinds/load_options.py) are declared with it. Their
keyword forms, the options of the command line, the fields of a request to the server, the hints for names of
other programs and the tables of the docs are made of these declarations. Nothing here imports PyTorch.
"""

from foredraft.arguments.calls import clear_calls, takes_fields_of
from foredraft.arguments.declaration import Declared, check_fields, declared, option, spelled_elsewhere

__all__ = [
    "Declared",
    "check_fields",
    "clear_calls",
    "declared",
    "option",
    "spelled_elsewhere",
    "takes_fields_of",
]
