"""Options whose value may be left out: the parser knows options with a value and flags, and no third kind."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.verify.defects import DEFAULT

__all__ = ["name_defaults"]

DEFAULTS = {"--self-test": DEFAULT}  # option -> the value that it has where none is given


def name_defaults(words: Sequence[str]) -> list[str]:
    """Give every option without its optional value the default value.

    The word after such an option is its value unless it begins with a dash.

    Examples:
        >>> name_defaults(["verify", "--self-test", "--json"])
        ['verify', '--self-test=residual', '--json']
        >>> name_defaults(["verify", "--self-test", "coin"])
        ['verify', '--self-test', 'coin']
    """
    named: list[str] = []
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else "-"
        left_out = word in DEFAULTS and following.startswith("-")
        named.append(f"{word}={DEFAULTS[word]}" if left_out else word)
    return named
