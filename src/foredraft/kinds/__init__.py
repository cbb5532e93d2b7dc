"""The kinds of drafters, policies and acceptance rules, and which of them fit together.

`tables` lists them by the names that users give; `compatibility` decides which combinations are valid.
Importing this package does not import PyTorch, so `--help` stays fast.
"""

from foredraft.kinds.compatibility import default_drafter, missing_part, suits, unused_options
from foredraft.kinds.tables import (
    DRAFTERS,
    POLICIES,
    PREDICTION,
    RULES,
    DrafterKind,
    PolicyKind,
    PolicyOption,
    RuleKind,
)

__all__ = [
    "DRAFTERS",
    "POLICIES",
    "PREDICTION",
    "RULES",
    "DrafterKind",
    "PolicyKind",
    "PolicyOption",
    "RuleKind",
    "default_drafter",
    "missing_part",
    "suits",
    "unused_options",
]
