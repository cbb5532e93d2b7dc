"""Skips: which sub-layers of the target a draft leaves out, and how people spell that.

Either some of them, each on its own (Draft & Verify, Zhang et al. 2023, arXiv:2309.08168), or all from a
layer on (early exit; LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710):

    skip:attn=3,5-7/mlp=4    the attention of layers 3, 5, 6 and 7, and the MLP of layer 4
    skip:none                nothing, so that the target drafts for itself: a test, never faster
    exit:8                   layers 0 to 7 run, then norm and head
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from foredraft.errors import ConfigError
from foredraft.model.decoder import Plan

__all__ = ["Skips", "is_spelled"]

SKIP, EXIT, NONE = "skip:", "exit:", "none"
KINDS = {"attn": "attention", "mlp": "mlp"}
SHAPE = "give exit:LAYER, or skip:attn=LAYERS/mlp=LAYERS with layers as in 3,5-7"
MOST = 10**5  # layers that a range may name, so that a slip of the finger costs no memory


def is_spelled(text: str) -> bool:
    """Whether it spells skips, and names no file."""
    return text.startswith((SKIP, EXIT))


@dataclass(frozen=True, slots=True)
class Skips:
    """attention, mlp: the layers whose sub-layer is left out, in order. exit: the first layer that is left
    out whole, with all that follow; None where the draft runs to the end."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    exit: int | None = None

    def check(self, layers: int, option: str = "plan") -> None:
        """Raises ConfigError that names what a model of so many layers cannot leave out."""
        if self.exit is not None:
            if self.attention or self.mlp:
                raise ConfigError(f"{option} has an exit and layers to skip; give one of the two")
            if not 1 <= self.exit < layers:
                raise ConfigError(
                    f"{option} exits before layer {self.exit}; give 1 to {layers - 1}, for the model has"
                    f" {layers} layers"
                )
        for name, named in (("attention", self.attention), ("mlp", self.mlp)):
            for layer in named:
                if not 0 <= layer < layers:
                    raise ConfigError(
                        f"{option} skips the {name} of layer {layer}; give 0 to {layers - 1}, for the model"
                        f" has {layers} layers"
                    )
            if len(set(named)) < len(named):
                raise ConfigError(f"{option} skips the {name} of a layer twice; give each layer once")

    def plan(self, layers: int) -> Plan:
        """The sub-layers of a draft's pass. What is left out adds nothing to the residual."""
        plan = Plan.full(layers)
        if self.exit is not None:
            left_out = range(self.exit, layers)
            return plan.without(left_out, left_out)
        return plan.without(self.attention, self.mlp)

    def as_exit(self, layers: int) -> Skips | None:
        """The early exit of the same plan; None where it is not one."""
        last = tuple(range(layers - len(self.attention), layers))
        if not self.attention == self.mlp == last or not 0 < len(last) < layers:
            return None
        return Skips(exit=last[0])

    @classmethod
    def spelled(cls, text: str) -> Skips:
        """Raises ConfigError where nobody could know what is meant."""
        if text.startswith(EXIT):
            return cls(exit=_number(text.removeprefix(EXIT), text))
        words = text.removeprefix(SKIP)
        if words == NONE:
            return cls()
        named: dict[str, tuple[int, ...]] = {}
        for part in words.split("/"):
            kind, equals, layers = part.partition("=")
            if not equals or kind not in KINDS or KINDS[kind] in named:
                raise _unclear(text)
            named[KINDS[kind]] = tuple(sorted(_layers(layers, text)))
        return cls(named.get("attention", ()), named.get("mlp", ()))

    def __str__(self) -> str:
        """As `spelled` reads it."""
        if self.exit is not None:
            return f"{EXIT}{self.exit}"
        parts = [
            f"{kind}={_ranges(getattr(self, name))}" for kind, name in KINDS.items() if getattr(self, name)
        ]
        return SKIP + ("/".join(parts) or NONE)


def _layers(words: str, text: str) -> Iterable[int]:
    for word in words.split(","):
        first, dash, last = word.partition("-")
        start = _number(first, text)
        stop = _number(last, text) if dash else start
        if not start <= stop < start + MOST:
            raise _unclear(text)
        yield from range(start, stop + 1)


def _number(word: str, text: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) < len(str(MOST))):
        raise _unclear(text)
    return int(word)


def _unclear(text: str) -> ConfigError:
    return ConfigError(f"plan is {text[:80]!r}; {SHAPE}")


def _ranges(layers: tuple[int, ...]) -> str:
    """3,5-7 of (3, 5, 6, 7)"""
    ordered = sorted(layers)
    cuts = [0, *(at + 1 for at, (a, b) in enumerate(pairwise(ordered)) if b > a + 1), len(ordered)]
    runs = [ordered[start:stop] for start, stop in pairwise(cuts)]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
