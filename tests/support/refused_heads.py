"""Heads that are refused: in one line, and pickles unread."""

from __future__ import annotations

from pathlib import Path

import pytest

import foredraft


def check_refused(target: Path, head: Path, message: str, drafter: str | None = None) -> None:
    with pytest.raises(foredraft.CheckpointError) as refusal:
        foredraft.load(target, draft=head, drafter=drafter, device="cpu")
    assert message in str(refusal.value) and "\n" not in str(refusal.value), refusal.value


def check_pickle(target: Path, file: Path, remedy: str, drafter: str | None = None) -> None:
    ran = file.parent / "ran"
    file.write_bytes(b"cposix\nsystem\n(S'touch %s'\ntR." % str(ran).encode())
    with pytest.raises(foredraft.CheckpointError, match=f"is a pickle.*{remedy}"):
        foredraft.load(target, draft=file.parent, drafter=drafter, device="cpu")
    assert not ran.exists()
