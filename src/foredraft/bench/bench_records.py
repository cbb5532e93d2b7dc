"""The records of a benchmark, for the command line, the HTML report and other programs.

Durations are in seconds, memory in bytes, and *costs* in plain steps of the target (a bare forward over one
token of each sequence). A missing figure is None, never 0 or NaN. The fields are the keys of the JSON
document.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

from foredraft.drafters.strict_records import as_record
from foredraft.profiling.others import DISTURBED

# Load beyond the number of cores that counts as other work: the benchmark's own threads keep every core busy,
# and the system's housekeeping comes on top.
HOUSEKEEPING = 0.5
FEW_REPEATS = 3  # from this number on, one slow run does not decide a median


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the quartiles of `count` figures, interpolated within the data."""

    median: float
    lower: float
    upper: float
    count: int

    @classmethod
    def of(cls, figures: Iterable[float]) -> Spread | None:
        """Return the spread of the figures, or None if there are none."""
        data = list(figures)
        if not data:
            return None
        if len(data) == 1:
            return cls(data[0], data[0], data[0], 1)
        lower, median, upper = quantiles(data, n=4, method="inclusive")
        return cls(median, lower, upper, len(data))


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model that took part."""

    role: str  # "target" or "draft"
    name: str  # the model's name
    parameters: int  # number of weights
    step_bytes: int  # bytes of the weights that one step reads, without an embedding that it only looks up in
    dtype: str  # of the weights
    weights: str | None = None  # how they are quantised; None if not, or in reports of older versions


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The measured memory bandwidth of this machine, and how it was measured."""

    bytes_per_second: float
    method: str


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a bare forward over `rows` tokens of each sequence."""

    rows: int  # tokens of each sequence
    v: float  # the median time over that of a forward over one token
    seconds: Spread  # the times


@dataclass(frozen=True, slots=True)
class DraftCost:
    """The cost c of drafting, in plain steps of the target."""

    first: float  # of the first step: the target's pass drove the weights out of the CPU's caches
    further: float  # of each further step

    def of(self, steps: float, drafts: float = 1.0) -> float:
        """Return the cost of `steps` steps in `drafts` drafts."""
        return drafts * self.first + (steps - drafts) * self.further


@dataclass(frozen=True, slots=True)
class ForwardCosts:
    """Costs of bare forwards, each timed right after others of its kind, as in decoding."""

    batch: int  # sequences in the batch
    context: int  # tokens that each sequence has in the KV cache
    verifying: tuple[Cost, ...]  # cost of a verifying pass, by rising number of rows from 1 on
    drafting: dict[str, DraftCost]  # by drafter's name; 0 for a drafter without forwards
    # share of the machine's read bandwidth that the forward over one row reaches
    bandwidth_share: float | None
    workload: str | None = None  # between whose runs the forwards were timed; None if timed alone
    others: Spread | None = None  # CPUs that other programs used in the turns; None where that is not known

    @property
    def step_seconds(self) -> float:
        """Seconds of a plain step, the unit of all costs."""
        return self.verifying[0].seconds.median


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best speed-up that the costs allow: the largest tau / (c_1 + ... + c_k + v(k + 1)) over k."""

    alpha: float  # the probability that a drafted token is accepted, given that all before it were
    draft_length: int  # the best draft length k, in tokens
    speedup: float  # the speed-up over plain decoding at that length, without host work


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Figures of the drafts over the counted prompts of a row."""

    alpha: float | None  # accepted / (accepted + rounds that a rejection ended); None if nothing was drafted
    acceptance_rate: float | None  # accepted / drafted; None if nothing was drafted
    acceptance_by_position: tuple[float, ...]  # share of the drafts reaching it that kept it
    mean_accepted_length: float  # tau, tokens emitted per round
    mean_draft_length: float  # tokens drafted per round, plain steps included


@dataclass(frozen=True, slots=True)
class RoundTime:
    """The parts of a mean round, in seconds, from runs that no other figure uses."""

    draft: float  # time in the drafter
    verify: float  # time in the target's verifying pass
    rest: float  # the rest: distributions, acceptance, commit and the decoding loop
    rounds: int  # rounds that were timed


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first new token that differs from plain decoding's, and its prompt; both count from 0."""

    prompt: int
    position: int


@dataclass(frozen=True, slots=True)
class Exactness:
    """The comparison of the tokens of every timed run with plain decoding's."""

    comparable: bool  # at temperature 0, and for Foredraft's own under the coupled rule
    identical: int  # prompts whose tokens were equal in every run
    prompts: int  # all prompts
    first: FirstDifference | None = None  # the first difference

    @property
    def holds(self) -> bool | None:
        """Whether all prompts are identical; None if they are not comparable."""
        return self.identical == self.prompts if self.comparable else None


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one workload at one batch size.

    Figures are over the counted prompts, on which plain decoding repeats few of its 4-grams, unless they say
    otherwise. A ratio is of tokens/s: the median over a prompt's repeats, then over the prompts.
    """

    workload: str  # name of the workload
    batch: int  # sequences decoded side by side
    contender: str  # name of the method; "plain" is Foredraft's plain decoding
    peer: bool  # another program
    lossless: bool = True  # the output has exactly the target's distribution
    note: str | None = None  # why the row has no figures; all figures are then None
    policy: str | None = None  # of a contender that drafts; a method may have a row for each of several
    tokens_per_second: Spread | None = None  # throughput of the decoding phase, all sequences together
    speedup: Spread | None = None  # over plain decoding
    over_peers: dict[str, Spread] | None = None  # over each other program, by its name
    over_single: float | None = None  # median tokens/s over that at batch size 1
    speedup_all: Spread | None = None  # over plain decoding, on all prompts
    prefill_seconds: Spread | None = None  # duration of reading the prompt, or all prompts of a batch
    others: Spread | None = None  # CPUs that other programs used during a timed run; None where not known
    drafting: DraftFigures | None = None  # figures of the drafts; None for plain decoding and other programs
    ceiling: Ceiling | None = None  # the best speed-up at the row's own alpha; None for several drafters
    perfect: Ceiling | None = None  # the same at alpha 1: no draft of this cost can gain more
    predicted: Spread | None = None  # from each prompt's own rounds (`figures.predicted_speedup`)
    measured_over_predicted: Spread | None = None  # `speedup` over `predicted`, prompt by prompt
    overhead: Spread | None = None  # o of a round, in plain steps; too low with several sequences
    round_time: RoundTime | None = None  # parts of a round; None for other programs
    repeated: Spread | None = None  # share of 4-grams that occurred before in the same output
    log_probability: Spread | None = None  # of a new token at temperature 1, in nats, if asked for
    counted: int = 0  # prompts that count
    prompts: int = 0  # all prompts
    exactness: Exactness | None = None  # over all prompts
    bandwidth_share: float | None = None  # of the target's weights that passes read, if their number is known
    peak_memory: int | None = None  # memory that loading and a run added, in bytes


@dataclass(frozen=True, slots=True)
class TurnCount:
    """The turns of a workload at one batch size; in each, every contender runs once."""

    workload: str  # name of the workload
    batch: int  # sequences decoded side by side
    kept: int  # turns whose figures count
    repeated: int  # turns that were taken again, because other programs disturbed them
    disturbed: int  # turns that count although every attempt was disturbed


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The report of a benchmark."""

    options: dict[str, Any]  # the options in effect, as plain values
    machine: dict[str, Any]  # the machine and the software versions, as plain values
    models: tuple[ModelRecord, ...]  # the target and the draft model
    bandwidth: Bandwidth | None  # the memory bandwidth, if it could be measured
    costs: tuple[ForwardCosts, ...]  # costs of bare forwards for each workload and batch size
    rows: tuple[Row, ...]  # one for each workload, batch size, method and policy
    notes: tuple[str, ...] = ()  # what was left out, and why
    finished: bool = True  # False if the benchmark was interrupted; `rows` and `costs` are then incomplete
    turns: tuple[TurnCount, ...] = ()  # one for each workload and batch size; none in older reports

    @property
    def typical_costs(self) -> tuple[ForwardCosts, ...]:
        """For each batch size, the costs of the workload with the median plain step."""
        found: dict[int, list[ForwardCosts]] = {}
        for costs in self.costs:
            found.setdefault(costs.batch, []).append(costs)
        ranked = [sorted(each, key=lambda costs: costs.step_seconds) for each in found.values()]
        return tuple(each[len(each) // 2] for each in ranked)

    @property
    def methods(self) -> tuple[Row, ...]:
        """The rows of each method under its own policy, which is the first one listed."""
        found = {(row.workload, row.batch, row.contender): row for row in reversed(self.rows)}
        return tuple(found.values())[::-1]

    @property
    def policies(self) -> tuple[Row, ...]:
        """The rows of the contenders that draft, if a comparison of policies was asked for."""
        asked = self.options.get("policies")
        return tuple(row for row in self.rows if row.policy is not None) if asked else ()

    @property
    def lossy(self) -> tuple[str, ...]:
        """The methods that are not lossless."""
        return tuple(dict.fromkeys(row.contender for row in self.rows if not row.lossless))

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the speeds of this run deserve no trust, in sentences; empty if nothing speaks against them."""
        found = []
        if (doubt := load_doubt(self.machine)) is not None:
            found.append(doubt)
        disturbed, kept = (sum(getattr(each, name) for each in self.turns) for name in ("disturbed", "kept"))
        if disturbed:
            found.append(
                f"Other programs used more than {DISTURBED:g} CPUs in {disturbed} of {kept} turns, in every"
                " attempt: repeat it on a quiet machine."
            )
        repeats = self.options.get("repeats")
        if repeats is not None and repeats < FEW_REPEATS:
            found.append(
                f"Every method ran only {'once' if repeats == 1 else 'twice'} on each prompt, so one slow run"
                f" decides a ratio: give {FEW_REPEATS} repeats or more."
            )
        return tuple(found)

    @property
    def turns_remark(self) -> str | None:
        """How many turns were taken again, in a sentence; None where the load is not known."""
        if not any(row.others is not None for row in self.rows):
            return None
        repeated, kept = (sum(getattr(each, name) for each in self.turns) for name in ("repeated", "kept"))
        return (
            f"others: CPUs that other programs used during a run. Beside the {kept} turns that count,"
            f" {repeated} had to be repeated, because these were more than {DISTURBED:g}."
        )

    @property
    def bandwidth_remark(self) -> str | None:
        """Why a share of the bandwidth exceeds 100 %, in a sentence; None if no share does."""
        shares = [each.bandwidth_share for each in self.costs] + [row.bandwidth_share for row in self.rows]
        if all(share is None or share <= 1 for share in shares):
            return None
        return (
            "A share of the bandwidth above 100 % means that the caches held a part of the weights from one"
            " step to the next; the bandwidth is that of the memory behind the caches."
        )

    def name(self, row: Row) -> str:
        """Return the row's method, with the policy where the method has several rows."""
        return row.contender if row in self.methods else f"{row.contender} under {row.policy}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; no value is NaN."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> BenchReport:
        """Return the report that `as_dict`, or its JSON, describes."""
        return as_record(cls, document)


def load_doubt(machine: Mapping[str, Any]) -> str | None:
    """Return a sentence on other programs that slowed a run down; None where the load says nothing."""
    load, cores = machine.get("highest_load"), machine.get("cores")
    if load is None or cores is None or load <= cores + HOUSEKEEPING:
        return None
    return (
        f"The load rose to {load:.1f} on {cores} cores during the run, so other programs slowed it"
        " down: repeat it on a quiet machine."
    )


# A prompt counts if less than this share of the 4-grams of plain decoding's output occurred in it before.
# Drafting a loop is easy, so prompts that lead into loops would overstate every speed-up.
MAX_REPEATED = 0.3
