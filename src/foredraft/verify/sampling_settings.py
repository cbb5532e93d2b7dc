"""Sampling settings that a verification uses; no PyTorch is imported here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

__all__ = ["DEFAULTS", "GREEDY", "GREEDY_PENALISED", "PENALISED", "RULES", "SETTINGS", "Rule", "Setting"]

Rule: TypeAlias = Literal["speculative", "block", "coupled"]
RULES: tuple[Rule, ...] = get_args(Rule)
DEFAULTS: tuple[Rule, ...] = ("speculative", "coupled")  # the rules of requests that name none


@dataclass(frozen=True, slots=True)
class Setting:
    """Sampling parameters of a check, as in `SamplingParams`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether emitted tokens change the next distribution."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def options(self) -> dict[str, Any]:
        """The parameters by name."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the parameters that are on.

        Examples:
            >>> str(Setting(temperature=0.8, top_k=50, top_p=0.9))
            'T=0.8 k=50 p=0.9'
        """
        shown = [("T", self.temperature, None), ("k", self.top_k, 0), ("p", self.top_p, 1.0)]
        shown += [("min-p", self.min_p, 0.0)]
        parts = [f"{name}={value:g}" for name, value, off in shown if value != off]
        if self.penalised:
            penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
            parts.append("penalties=" + "/".join(f"{value:g}" for value in penalties))
        return " ".join(parts)


# A repetition penalty below 1 and a negative presence penalty make tokens recur at once, within one draft,
# where penalties must follow the draft; penalties that prevent repeats would hardly show in a few tokens. The
# frequency penalty then ends the repeats, so that texts do not become loops.
_PENALTIES: dict[str, float] = {
    "repetition_penalty": 0.9,
    "presence_penalty": -2.0,
    "frequency_penalty": 0.5,
}
GREEDY = Setting(temperature=0.0)
GREEDY_PENALISED = Setting(temperature=0.0, **_PENALTIES)  # type: ignore[arg-type]  # top_k is no penalty
PENALISED = Setting(temperature=0.9, min_p=0.02, **_PENALTIES)  # type: ignore[arg-type]  # as above
# Settings of the chi-square tests: the full distribution, a truncated one, and one with penalties and min-p.
SETTINGS = (Setting(), Setting(temperature=0.8, top_k=50, top_p=0.9), PENALISED)
