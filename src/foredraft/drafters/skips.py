"""Skips: the sub-layers that the target leaves out when it drafts for itself, and their notation.

A draft skips any attention and MLP sub-layers (Draft & Verify, Zhang et al. 2023, arXiv:2309.08168), or all
layers from one on (early exit; LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710):

    skip:attn=3,5-7/mlp=4    skips the attention of layers 3, 5, 6 and 7, and the MLP of layer 4
    skip:none                skips nothing: the target drafts for itself, which is never faster; for tests
    exit:8                   runs layers 0 to 7, then the final norm and the head
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

from foredraft.errors import ConfigError
from foredraft.model.spec import Plan

SKIP, EXIT, NONE = "skip:", "exit:", "none"
KINDS = {"attn": "attention", "mlp": "mlp"}
SYNTAX = "give exit:LAYER, or skip:attn=LAYERS/mlp=LAYERS with layers as in 3,5-7"
MAX_RANGE = 10**5  # layers in one range; far above any model, so that a typing error costs no memory


def is_skips(text: str) -> bool:
    """Return whether a text is in the notation of skips, and so is not the name of a file."""
    return text.startswith((SKIP, EXIT))


@dataclass(frozen=True, slots=True)
class Skips:
    """The sub-layers that a draft leaves out.

    Examples:
        >>> Skips.parse("skip:attn=3,5-7/mlp=4")
        Skips(attention=(3, 5, 6, 7), mlp=(4,), exit=None)
    """

    attention: tuple[int, ...] = ()  # layers whose attention is skipped, in ascending order
    mlp: tuple[int, ...] = ()  # layers whose MLP is skipped, in ascending order
    exit: int | None = None  # first layer that an early exit leaves out; None: the draft runs to the end

    def check(self, layers: int, producers: Collection[int] = ()) -> None:
        """Raise ConfigError if a model cannot leave these sub-layers out."""
        if (mistake := self.mistake(layers)) is not None:
            problem, remedy = mistake
            raise ConfigError(problem, option="plan", remedy=remedy)
        if (read := next(filter(producers.__contains__, self.attention), None)) is not None:
            problem = f"skips the attention of layer {read}, whose keys and values other layers read"
            raise ConfigError(problem, option="plan", remedy="leave that layer out of the plan")

    def mistake(self, layers: int) -> tuple[str, str] | None:
        """Return what a model of this many layers cannot skip, and the remedy; None if it can skip all."""
        last = f"{layers - 1}: the model has {layers} layers"
        if self.exit is not None:
            if self.attention or self.mlp:
                return "has both an exit and layers to skip", "give one of the two"
            if not 1 <= self.exit < layers:
                return f"exits before layer {self.exit}", f"give 1 to {last}"
        for name, skipped in (("attention", self.attention), ("MLP", self.mlp)):
            for layer in skipped:
                if not 0 <= layer < layers:
                    return f"skips the {name} of layer {layer}", f"give 0 to {last}"
            if len(set(skipped)) < len(skipped):
                return f"skips the {name} of a layer twice", "give each layer once"
        return None

    def plan(self, layers: int) -> Plan:
        """Return the sub-layers that a draft runs; a skipped one adds nothing to the residual stream."""
        left_out = range(self.exit or 0, layers)
        attention, mlp = (self.attention, self.mlp) if self.exit is None else (left_out, left_out)
        return Plan.full(layers).without(attention, mlp)

    def as_exit(self, layers: int) -> Skips | None:
        """Return the early exit that runs the same sub-layers, or None if there is none."""
        last = tuple(range(layers - len(self.attention), layers))
        alike = self.attention == self.mlp == last and 0 < len(last) < layers
        return Skips(exit=last[0]) if alike else None

    @classmethod
    def parse(cls, text: str) -> Skips:
        if text.startswith(EXIT):
            return cls(exit=_parse_number(text.removeprefix(EXIT), text))
        words = text.removeprefix(SKIP)
        if words == NONE:
            return cls()
        skipped: dict[str, tuple[int, ...]] = {}
        for part in words.split("/"):
            kind, equals, layers = part.partition("=")
            if not equals or kind not in KINDS or KINDS[kind] in skipped:
                raise _syntax_error(text)
            skipped[KINDS[kind]] = tuple(sorted(_parse_layers(layers, text)))
        return cls(skipped.get("attention", ()), skipped.get("mlp", ()))

    def __str__(self) -> str:
        if self.exit is not None:
            return f"{EXIT}{self.exit}"
        parts = []
        for kind, name in KINDS.items():
            layers = sorted(getattr(self, name))
            cuts = [0, *(at + 1 for at, (a, b) in enumerate(pairwise(layers)) if b > a + 1), len(layers)]
            runs = [layers[start:stop] for start, stop in pairwise(cuts)]  # "3,5-7" for (3, 5, 6, 7)
            ranges = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs if run]
            parts += [f"{kind}={','.join(ranges)}"] if layers else []
        return SKIP + ("/".join(parts) or NONE)


def _parse_layers(words: str, text: str) -> Iterable[int]:
    for word in words.split(","):
        first, dash, last = word.partition("-")
        start = _parse_number(first, text)
        stop = _parse_number(last, text) if dash else start
        if not start <= stop < start + MAX_RANGE:
            raise _syntax_error(text)
        yield from range(start, stop + 1)


def _parse_number(word: str, text: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) < len(str(MAX_RANGE))):
        raise _syntax_error(text)
    return int(word)


def _syntax_error(text: str) -> ConfigError:
    return ConfigError(option="plan", value=text[:80], remedy=SYNTAX)
