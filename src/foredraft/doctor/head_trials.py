"""The settings of a head that the doctor tries: each is a known way in which a head is misread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from foredraft.drafters.heads.record import HeadRecord
from foredraft.drafters.heads.settings import HeadSettings
from foredraft.errors import CheckpointError
from foredraft.model.spec import ModelSpec

__all__ = ["changes", "merged", "taps_of"]

THETA = 10_000.0  # with which SafeAILab's program trains, whatever the config says
SHIFTS = (-1, 1)


def changes(record: HeadRecord, target: ModelSpec, longest: int) -> Iterator[HeadSettings]:
    """Yield each setting that differs from the record in one thing.

    Args:
        record: What the head's files say.
        target: The target.
        longest: Tokens of the longest text.
    """
    for shift in SHIFTS:
        yield HeadSettings(tap_shift=shift)
    for theta in dict.fromkeys((THETA, target.rope.theta)):
        if theta != record.spec.rope.theta:
            yield HeadSettings(rope_theta=theta)
    for flag in record.misread:
        yield HeadSettings(**{flag: not getattr(record, flag)})
    if record.own_head:
        yield HeadSettings(own_head=False)
    if record.own_embedding:
        yield HeadSettings(own_embedding=False)
    trained = record.spec.max_positions
    for window in dict.fromkeys((trained, trained // 2)):
        if 0 < window < longest:
            yield HeadSettings(window=window)


def merged(one: HeadSettings, other: HeadSettings) -> HeadSettings:
    """Return both settings together; the second goes before the first."""
    return HeadSettings(**{**asdict(one), **other.given})


def possible(settings: HeadSettings, record: HeadRecord, target: ModelSpec) -> HeadRecord | None:
    """Return the record with the settings; None where the head or the target does not allow them."""
    try:
        return settings.applied(record, target)
    except CheckpointError:
        return None


def taps_of(record: HeadRecord, target: ModelSpec) -> list[int]:
    """Return the boundaries that any setting reads."""
    taps = record.taps or ()
    near = {tap + shift for tap in taps for shift in (0, *SHIFTS)}
    return sorted(tap for tap in near if 0 <= tap <= target.layers)


def reread(before: HeadRecord, after: HeadRecord) -> bool:
    """Return whether a head with another record has other weights."""
    return replace(before, own_head=after.own_head, own_embedding=after.own_embedding) != before
