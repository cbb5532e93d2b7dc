"""Make a file one that another user could have written, in each way that there is; change a document of the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft import user_cache

Change = Callable[[Path, pytest.MonkeyPatch], str]


def as_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process take itself for another user, to whom none of this user's files belong."""
    user = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: user)


def _foreign(file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    as_another_user(monkeypatch)
    return "belongs to another user"


def _opened(depth: int, mode: int) -> Change:
    def change(file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        path = (file, *file.parents)[depth]
        path.chmod(mode)
        return f"{path}, which can be written by other users"

    return change


NOT_PRIVATE: dict[str, Change] = {
    "another user's": _foreign,
    "an open file": _opened(0, 0o646),
    "an open folder": _opened(1, 0o777),
    "an open, sticky folder": _opened(1, 0o1777),
    "an open folder above": _opened(2, 0o777),
}


def replace_document(file: Path, document: Any) -> None:
    """Change a document of the user's cache, so that the change is not seen by its digest."""
    content = json.loads(file.read_text())
    content |= {"document": document, "digest": user_cache._digest_of(document)}
    file.write_text(json.dumps(content) + "\n")
