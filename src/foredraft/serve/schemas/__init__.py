"""JSON schemas of requests: fitted to what a grammar can hold, and checked for the rest.

`fit` returns the schema for the grammar, and what it leaves out; `broken` checks arguments for that.
"""

from __future__ import annotations

from foredraft.serve.schemas.fitting import Fitted, broken, fit

__all__ = ["Fitted", "broken", "fit"]
