"""What a benchmark found: records, for the command line, for the report, and for programs.

Contract: nothing here measures or prints. All durations are seconds, all memory is bytes, all *costs* are in
plain steps of the target (a bare forward over one token of each sequence). A figure that could not be had is
None, never 0 or NaN. Words as in docs/architecture.md.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from statistics import quantiles
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = [
    "PLAIN",
    "Bandwidth",
    "Ceiling",
    "Cost",
    "Costs",
    "Divergence",
    "DraftCost",
    "Drafting",
    "Exactness",
    "Model",
    "Report",
    "RoundTime",
    "Row",
    "Spread",
]

PLAIN = "plain"  # the contender that all others are held against
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of `count` figures; they lie within the data."""

    median: float
    lower: float
    upper: float
    count: int

    @classmethod
    def of(cls, figures: Iterable[float]) -> Spread | None:
        """None where there are none."""
        data = list(figures)
        if not data:
            return None
        if len(data) == 1:
            return cls(data[0], data[0], data[0], 1)
        lower, median, upper = quantiles(data, n=4, method="inclusive")
        return cls(median, lower, upper, len(data))


@dataclass(frozen=True, slots=True)
class Model:
    """role: "target" or "draft". step_bytes: weights that one step reads, each once; of an embedding whose
    rows are only looked up, nothing."""

    role: str
    name: str
    parameters: int
    step_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What this machine's memory was seen to give. method: how that was measured."""

    bytes_per_second: float
    method: str


@dataclass(frozen=True, slots=True)
class Cost:
    """A bare forward over `rows` tokens of each sequence: its time, and v, the ratio of the medians."""

    rows: int
    v: float
    seconds: Spread


@dataclass(frozen=True, slots=True)
class DraftCost:
    """c of a draft's first step, which finds the drafter's weights as the target left them, and of each
    further one."""

    first: float
    further: float

    def of(self, steps: float, drafts: float = 1.0) -> float:
        """Of so many steps in so many drafts."""
        return drafts * self.first + (steps - drafts) * self.further


@dataclass(frozen=True, slots=True)
class Costs:
    """Bare forwards over `batch` sequences with `context` tokens each, all after others of their own kind.

    verifying: by rows, rising, from 1 on. drafting: by drafter: what a round takes beyond its verifying pass;
    0 where no forward is needed. bandwidth_share: of the machine's read bandwidth that the forward over one
    row attains. workload: between whose runs they were timed; None where they were timed alone.
    """

    batch: int
    context: int
    verifying: tuple[Cost, ...]
    drafting: dict[str, DraftCost]
    bandwidth_share: float | None
    workload: str | None = None

    @property
    def step_seconds(self) -> float:
        """Of a plain step: the unit of all costs."""
        return self.verifying[0].seconds.median


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What costs allow at best: the largest tau / (c_1 + ... + c_k + v(k + 1)) over draft lengths k, and that
    length, if each drafted token were accepted with probability alpha."""

    alpha: float
    draft_length: int
    speedup: float


@dataclass(frozen=True, slots=True)
class Drafting:
    """What the drafts of a row were like, over its counted prompts; alpha and the acceptance rate are None
    where nothing was drafted. acceptance_by_position: of the drafts that reached it."""

    alpha: float | None
    acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...]
    mean_accepted_length: float
    mean_draft_length: float


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Where the time of a mean round goes, in seconds; from runs of their own, which no other figure uses.

    rest: all but the forwards of drafter and target: laws, acceptance, commit, the loop.
    """

    draft: float
    verify: float
    rest: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first new token that is not own plain decoding's, and the prompt that it is in; both from 0."""

    prompt: int
    position: int


@dataclass(frozen=True, slots=True)
class Exactness:
    """Tokens against own plain decoding's, in every timed run.

    comparable: whether a lossless one must have the same ones: at temperature 0, and ours under the coupled
    rule; otherwise nothing was compared. identical: prompts of which every run was, out of `prompts`.
    """

    comparable: bool
    identical: int
    prompts: int
    first: Divergence | None = None

    @property
    def holds(self) -> bool | None:
        """None: not comparable."""
        return self.identical == self.prompts if self.comparable else None


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one workload at one batch size. Figures are over the counted prompts, those whose
    plain output repeats few of its 4-grams, unless they say otherwise; a ratio is of tokens/s, the median
    over the interleaved repeats of a prompt (or a batch of them), then over the prompts.

    Attributes:
        workload: Its name.
        batch: Sequences decoded side by side.
        contender: Its method; `PLAIN` is own plain decoding.
        policy: Of ours that draft; one method may have a row under each of several.
        peer: Somebody else's program.
        lossless: Its output has the model's own law.
        note: Why there are no figures, where there are none; all others are None then.
        tokens_per_second: Of the decoding phase, all sequences together.
        speedup: Over own plain decoding.
        over_peers: Over each peer, by its name.
        over_single: tokens/s by those of the same contender on the same workload at batch 1, of the medians.
        speedup_all: Over own plain decoding, on all prompts.
        prefill_seconds: Of reading the prompt (or all prompts of a batch).
        drafting: None of peers.
        ceiling: What its c and v allow at best at the alpha of its drafts; None where nothing was drafted, or
            where no single drafter's costs stand behind it.
        perfect: The same at alpha 1: more than that no drafts of this cost can gain.
        predicted: tau by the mean of c_1 + ... + c_s + v(k + 1) over the rounds, with each prompt's own tau
            and drafts: of k tokens, for which whoever drafted took s steps.
        measured_over_predicted: `speedup` by that, prompt by prompt.
        overhead: o: what is left of a round's time beside those forwards, in plain steps; of several
            sequences too low, since c and v are of full batches, which the first and last rounds are not.
        round_time: None of peers.
        repeated: Share of 4-grams that occurred before in the same output.
        counted: Prompts that count.
        prompts: All prompts.
        exactness: Over all prompts.
        bandwidth_share: Bytes of the target's weights that its passes read in a second, by the machine's read
            bandwidth; None where the passes are not known.
        peak_memory: Added by loading and by a run.
    """

    workload: str
    batch: int
    contender: str
    peer: bool
    lossless: bool = True
    note: str | None = None
    policy: str | None = None
    tokens_per_second: Spread | None = None
    speedup: Spread | None = None
    over_peers: dict[str, Spread] | None = None
    over_single: float | None = None
    speedup_all: Spread | None = None
    prefill_seconds: Spread | None = None
    drafting: Drafting | None = None
    ceiling: Ceiling | None = None
    perfect: Ceiling | None = None
    predicted: Spread | None = None
    measured_over_predicted: Spread | None = None
    overhead: Spread | None = None
    round_time: RoundTime | None = None
    repeated: Spread | None = None
    counted: int = 0
    prompts: int = 0
    exactness: Exactness | None = None
    bandwidth_share: float | None = None
    peak_memory: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark. options, machine: names and plain values. costs: of each workload and batch size. notes:
    what was left out, and why. finished: False where it was interrupted; `rows` and `costs` are those that
    were done by then."""

    options: dict[str, Any]
    machine: dict[str, Any]
    models: tuple[Model, ...]
    bandwidth: Bandwidth | None
    costs: tuple[Costs, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    finished: bool = True

    @property
    def typical_costs(self) -> tuple[Costs, ...]:
        """Of each batch size, those whose plain step is the median one's."""
        found: dict[int, list[Costs]] = {}
        for costs in self.costs:
            found.setdefault(costs.batch, []).append(costs)
        ranked = [sorted(each, key=lambda costs: costs.step_seconds) for each in found.values()]
        return tuple(each[len(each) // 2] for each in ranked)

    @property
    def methods(self) -> tuple[Row, ...]:
        """The rows of each method under the policy that it has by itself, which come first."""
        return tuple({_method(row): row for row in reversed(self.rows)}.values())[::-1]

    @property
    def policies(self) -> tuple[Row, ...]:
        """The rows of whoever drafts, where a comparison of policies was asked for."""
        asked = self.options.get("policies")
        return tuple(row for row in self.rows if row.policy is not None) if asked else ()

    @property
    def lossy(self) -> tuple[str, ...]:
        """The methods whose output has not the model's own law."""
        return tuple(dict.fromkeys(row.contender for row in self.rows if not row.lossless))

    def name(self, row: Row) -> str:
        """Its method, with the policy where that is another than the method's own."""
        return row.contender if row in self.methods else f"{row.contender} under {row.policy}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; holds no NaN."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Report:
        """What `as_dict` gave, also by way of JSON. Raises TypeError on anything else."""
        report = _rebuilt(cls, document)
        assert isinstance(report, cls)
        return report


def _method(row: Row) -> tuple[str, int, str]:
    return row.workload, row.batch, row.contender


def _rebuilt(kind: Any, value: Any) -> Any:
    """`value` of plain JSON as a `kind`: a record, tuple, dict or optional one of them, or itself."""
    if get_origin(kind) in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (option for option in get_args(kind) if option is not types.NoneType)
        return _rebuilt(kind, value)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        if unknown := value.keys() - {field.name for field in fields(kind)}:
            raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
        return kind(**{name: _rebuilt(hints[name], item) for name, item in value.items()})
    if get_origin(kind) is tuple:
        return tuple(_rebuilt(get_args(kind)[0], item) for item in value)
    if get_origin(kind) is dict:
        return {key: _rebuilt(get_args(kind)[1], item) for key, item in value.items()}
    return value
