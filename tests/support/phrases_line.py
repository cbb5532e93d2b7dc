"""The line of the table of drafters that makes `phrases` a drafter: `pytest -p tests.support.phrases_line`.

It has to be there before anything else reads the table, as a line in its file is.
"""

from __future__ import annotations

from importlib import import_module

from foredraft.kinds.tables import DRAFTERS, DrafterKind

DRAFTERS["phrases"] = DrafterKind(
    "known phrases, word for word", lambda: import_module("tests.support.phrases").ASSET, given_by="draft"
)
