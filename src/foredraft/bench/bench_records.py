"""The records of a benchmark, for the command line, the HTML report and other programs.

Contract: nothing here measures or prints. Durations are in seconds, memory in bytes, and *costs* in plain
steps of the target (a bare forward over one token of each sequence). A missing figure is None, never 0 or
NaN. The fields are the keys of the JSON document. Terms as in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

from foredraft.drafters.strict_records import as_record
from foredraft.profiling.others import DISTURBED

__all__ = [
    "Bandwidth",
    "BenchReport",
    "Ceiling",
    "Cost",
    "DraftCost",
    "DraftFigures",
    "Exactness",
    "FirstDifference",
    "ForwardCosts",
    "ModelRecord",
    "RoundTime",
    "Row",
    "Spread",
    "TurnCount",
    "load_doubt",
]

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
    """A model that took part.

    Attributes:
        role: "target" or "draft".
        name: The model's name.
        parameters: Number of weights.
        step_bytes: Bytes of the weights that one step reads, without an embedding that it only looks up in.
        dtype: Of the weights.
        weights: How they are quantised; None if they are not, or if the report is of an older version.
    """

    role: str
    name: str
    parameters: int
    step_bytes: int
    dtype: str
    weights: str | None = None


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The measured memory bandwidth of this machine, and how it was measured."""

    bytes_per_second: float
    method: str


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a bare forward over `rows` tokens of each sequence.

    Attributes:
        rows: Tokens of each sequence.
        v: The median time over that of a forward over one token.
        seconds: The times.
    """

    rows: int
    v: float
    seconds: Spread


@dataclass(frozen=True, slots=True)
class DraftCost:
    """The cost c of drafting, in plain steps of the target.

    Attributes:
        first: Of a draft's first step. It may cost more, because the target's pass has driven the drafter's
            weights out of the CPU's caches.
        further: Of each further step.
    """

    first: float
    further: float

    def of(self, steps: float, drafts: float = 1.0) -> float:
        """Return the cost of `steps` steps in `drafts` drafts."""
        return drafts * self.first + (steps - drafts) * self.further


@dataclass(frozen=True, slots=True)
class ForwardCosts:
    """Costs of bare forwards, each timed right after others of its kind, as in decoding.

    Attributes:
        batch: Sequences in the batch.
        context: Tokens that each sequence has in the KV cache.
        verifying: Cost of a verifying pass, by rising number of rows from 1 on.
        drafting: Cost of drafting by drafter's name: the time of a round less that of its verifying pass;
            0 for a drafter without forwards.
        bandwidth_share: Share of the machine's read bandwidth that the forward over one row reaches.
        workload: The workload between whose runs the forwards were timed; None if they were timed alone.
        others: CPUs that other programs used in the turns; None where that is not known.
    """

    batch: int
    context: int
    verifying: tuple[Cost, ...]
    drafting: dict[str, DraftCost]
    bandwidth_share: float | None
    workload: str | None = None
    others: Spread | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds of a plain step, the unit of all costs."""
        return self.verifying[0].seconds.median


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best speed-up that the costs allow: the largest tau / (c_1 + ... + c_k + v(k + 1)) over k.

    Attributes:
        alpha: The probability that a drafted token is accepted, given that all before it were.
        draft_length: The best draft length k, in tokens.
        speedup: The speed-up over plain decoding at that length, without host work.
    """

    alpha: float
    draft_length: int
    speedup: float


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Figures of the drafts over the counted prompts of a row.

    Attributes:
        alpha: accepted / (accepted + rounds that a rejection ended); None if nothing was drafted.
        acceptance_rate: accepted / drafted; None if nothing was drafted.
        acceptance_by_position: For each position, the share of the drafts reaching it whose token was kept.
        mean_accepted_length: tau, tokens emitted per round.
        mean_draft_length: Tokens drafted per round, plain steps included.
    """

    alpha: float | None
    acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...]
    mean_accepted_length: float
    mean_draft_length: float


@dataclass(frozen=True, slots=True)
class RoundTime:
    """The parts of a mean round, in seconds, from runs that no other figure uses.

    Attributes:
        draft: Time in the drafter.
        verify: Time in the target's verifying pass.
        rest: The rest: distributions, acceptance, commit and the decoding loop.
        rounds: Rounds that were timed.
    """

    draft: float
    verify: float
    rest: float
    rounds: int


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first new token that differs from plain decoding's, and its prompt; both count from 0."""

    prompt: int
    position: int


@dataclass(frozen=True, slots=True)
class Exactness:
    """The comparison of the tokens of every timed run with plain decoding's.

    Attributes:
        comparable: Whether the tokens must be equal: at temperature 0, and for Foredraft's contenders under
            the coupled rule. Otherwise nothing is compared.
        identical: Prompts whose tokens were equal in every run.
        prompts: All prompts.
        first: The first difference.
    """

    comparable: bool
    identical: int
    prompts: int
    first: FirstDifference | None = None

    @property
    def holds(self) -> bool | None:
        """Whether all prompts are identical; None if they are not comparable."""
        return self.identical == self.prompts if self.comparable else None


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one workload at one batch size.

    Figures are over the counted prompts, on which plain decoding repeats few of its 4-grams, unless they say
    otherwise. A ratio is of tokens/s: the median over the interleaved repeats of a prompt (or of a batch of
    prompts), then over the prompts.

    Attributes:
        workload: Name of the workload.
        batch: Sequences decoded side by side.
        contender: Name of the method; "plain" is Foredraft's plain decoding.
        peer: Another program.
        lossless: The output has exactly the target's distribution.
        note: Why the row has no figures; all figures are then None.
        policy: Name of the policy of a contender that drafts; a method may have a row for each of several.
        tokens_per_second: Throughput of the decoding phase, all sequences together.
        speedup: Over plain decoding.
        over_peers: Over each other program, by its name.
        over_single: Median tokens/s over that of the same contender and workload at batch size 1.
        speedup_all: Over plain decoding, on all prompts.
        prefill_seconds: Duration of reading the prompt, or all prompts of a batch.
        others: CPUs that other programs used during a timed run; None where that is not known.
        drafting: Figures of the drafts; None for plain decoding and other programs.
        ceiling: The best speed-up that c and v allow at the row's own alpha; None if nothing was drafted, or
            if the method mixes drafters.
        perfect: The same at alpha 1: no draft of this cost can gain more.
        predicted: tau over the mean of c_1 + ... + c_s + v(k + 1) per round, with each prompt's own rounds of
            k drafted tokens and s drafter steps.
        measured_over_predicted: `speedup` over `predicted`, prompt by prompt.
        overhead: o, the time of a round less its forwards, in plain steps. With several sequences it is too
            low, because c and v are of full batches, and the first and last rounds are not full.
        round_time: Parts of a round; None for other programs.
        repeated: Share of 4-grams that occurred before in the same output.
        log_probability: Of a new token by the target at temperature 1, in nats, mean of a text; None where no
            contender of the benchmark asks for it.
        counted: Prompts that count.
        prompts: All prompts.
        exactness: Over all prompts.
        bandwidth_share: Bytes of the target's weights that its passes read per second, over the machine's
            read bandwidth; None if the number of passes is unknown.
        peak_memory: Memory that loading and a run added, in bytes.
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
    others: Spread | None = None
    drafting: DraftFigures | None = None
    ceiling: Ceiling | None = None
    perfect: Ceiling | None = None
    predicted: Spread | None = None
    measured_over_predicted: Spread | None = None
    overhead: Spread | None = None
    round_time: RoundTime | None = None
    repeated: Spread | None = None
    log_probability: Spread | None = None
    counted: int = 0
    prompts: int = 0
    exactness: Exactness | None = None
    bandwidth_share: float | None = None
    peak_memory: int | None = None


@dataclass(frozen=True, slots=True)
class TurnCount:
    """The turns of a workload at one batch size; in each, every contender runs once.

    Attributes:
        workload: Name of the workload.
        batch: Sequences decoded side by side.
        kept: Turns whose figures count.
        repeated: Turns that were taken again, because other programs disturbed them.
        disturbed: Turns that count although every attempt was disturbed.
    """

    workload: str
    batch: int
    kept: int
    repeated: int
    disturbed: int


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The report of a benchmark.

    Attributes:
        options: The options in effect, as plain values.
        machine: The machine and the software versions, as plain values.
        models: The target and the draft model.
        bandwidth: The memory bandwidth, if it could be measured.
        costs: Costs of bare forwards for each workload and batch size.
        rows: One for each workload, batch size, method and policy.
        notes: What was left out, and why.
        finished: False if the benchmark was interrupted; `rows` and `costs` are then incomplete.
        turns: One for each workload and batch size; none in reports of older versions.
    """

    options: dict[str, Any]
    machine: dict[str, Any]
    models: tuple[ModelRecord, ...]
    bandwidth: Bandwidth | None
    costs: tuple[ForwardCosts, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    finished: bool = True
    turns: tuple[TurnCount, ...] = ()

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
        return tuple({_key(row): row for row in reversed(self.rows)}.values())[::-1]

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
        shares = [costs.bandwidth_share for costs in self.costs]
        shares += [row.bandwidth_share for row in self.rows]
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
        """Return the report that `as_dict`, or its JSON, describes.

        Raises:
            TypeError: A key is missing or unknown, or its value is of another type.
        """
        return as_record(cls, document)


def _key(row: Row) -> tuple[str, int, str]:
    return row.workload, row.batch, row.contender


def load_doubt(machine: Mapping[str, Any]) -> str | None:
    """Return a sentence on other programs that slowed a run down; None where the load says nothing.

    Args:
        machine: Has the number of `cores`, and the `highest_load` of the run.
    """
    load, cores = machine.get("highest_load"), machine.get("cores")
    if load is None or cores is None or load <= cores + HOUSEKEEPING:
        return None
    return (
        f"The load rose to {load:.1f} on {cores} cores during the run, so other programs slowed it"
        " down: repeat it on a quiet machine."
    )
