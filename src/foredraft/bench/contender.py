"""Contenders: ways of decoding that take part in a benchmark, the timing of one run, and the line-up of a
run.

All share the weights, the dtype, the threads, the temperature and the prompts, ignore the end-of-text token
and make exactly as many tokens as they are asked for. The decoding phase lasts from the start of the first
round to the end of the last one; prompt reading within it, as in a batch, counts as prefill.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from foredraft.bench.contenders import CONTENDERS, PROGRAMS
from foredraft.bench.machine_record import Memory
from foredraft.decode.params import RuleName, SamplingParams
from foredraft.decode.policy import Policy
from foredraft.decode.stats import Stats
from foredraft.errors import ConfigError, ForedraftError, Option, RequestError, python_spelling
from foredraft.kinds.tables import DRAFTERS, RULES
from foredraft.llm import LLM
from foredraft.loading.checkpoints import make_policy
from foredraft.loading.machine_limits import free_memory
from foredraft.model.source import ModelSource
from foredraft.model.weights import weight_bytes
from foredraft.profiling.others import Load
from foredraft.profiling.timing import DecodingTimer, observed, replaced


@dataclass(frozen=True, slots=True)
class BenchContext:
    """The settings that all contenders share."""

    llm: LLM  # the loaded Foredraft engine
    target: ModelSource  # the target
    draft: ModelSource | None  # the draft model, if there is one
    dtype: torch.dtype  # of the weights and of the KV cache
    device: torch.device  # where the models run
    positions: int  # tokens of the longest prompt plus its new tokens
    temperature: float = 0.0  # sampling temperature; 0 is greedy
    acceptance: RuleName = "speculative"  # the acceptance rule of Foredraft's contenders; a lossless one
    max_draft: int | None = None  # the longest draft as passed to `load`, in tokens
    policy_options: Mapping[str, float | str] = field(default_factory=dict)  # options of the loaded policy
    _policies: dict[tuple[str, int], Policy] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def policy_for(self, drafter: str, name: str) -> Policy:
        """Return the policy that `generate` would use, one per length, so that it measures costs once."""
        engine, runner = self.llm.loaded.engine, self.llm.loaded.runner
        loaded = engine.policy
        self._policies.setdefault((loaded.name, loaded.max_draft), loaded)
        options = self.policy_options if name == loaded.name else {}
        known = engine.drafters.get(drafter)
        planned = None if known is None else known.planned
        longest = max((each.longest_draft for each in engine.drafters.values()), default=0)
        policy = make_policy(name, options, self.max_draft, runner, planned, longest)
        return self._policies.setdefault((name, policy.max_draft), policy)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters that are loaded."""
        return tuple(self.llm.loaded.engine.drafters)


@dataclass(frozen=True, slots=True)
class Timing:
    """The outputs and the durations of one run; a first token made in the prefill pass is not decoded."""

    tokens: tuple[tuple[int, ...], ...]  # new token ids of each prompt
    prefill_seconds: float  # duration of everything before the decoding phase
    decode_seconds: float  # duration of the decoding phase
    decoded_tokens: int  # tokens made in the decoding phase, all prompts together
    passes: int | None = None  # forward passes of the target in the decoding phase; None where unknown
    stats: Stats | None = None  # statistics of all prompts merged; None for other programs
    load: Load | None = None  # what other programs took meanwhile; None where it is not known

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the decoding phase, all prompts together."""
        return self.decoded_tokens / self.decode_seconds


class Contender:
    """A way of decoding that a benchmark times."""

    name: str  # unique: the method, and the policy where the method runs under several
    method: str  # the name in the table of contenders (`contenders.CONTENDERS`)
    policy_name: str | None = None  # None for plain decoding and for other programs
    peer = True  # it is another program
    lossless = True  # the output has exactly the target's distribution
    batch_sizes: tuple[int, ...] | None = None  # numbers of prompts that one run can take; None for any

    def run(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Decode `new_tokens` for each prompt as one batch, starting from an empty KV cache."""
        raise NotImplementedError

    def close(self) -> None:
        """Free memory and files; `run` must not be called afterwards."""


class ForedraftContender(Contender):
    """Plain or speculative decoding by the loaded engine, which the benchmark's caller owns.

    Under the coupled rule a prompt's seed is a function of the prompt, so that all its runs use the same
    noise.
    """

    peer = False

    def __init__(
        self,
        name: str,  # the contender's name, which is also its method
        llm: LLM,  # the loaded engine
        drafter: str,  # name of the drafter, or "none" for plain decoding
        *,
        temperature: float = 0.0,  # sampling temperature; 0 is greedy
        acceptance: RuleName = "speculative",  # the acceptance rule
        policy: Policy | None = None,
    ) -> None:
        self.name, self.method, self.llm, self.drafter = name, name, llm, drafter
        self.temperature, self.acceptance = temperature, acceptance
        self.policy: Policy = policy or llm.loaded.engine.policy  # None: the loaded one
        self.policy_name = None if drafter == "none" else self.policy.name
        self.lossless = RULES[acceptance].lossless and (drafter not in DRAFTERS or DRAFTERS[drafter].lossless)

    def with_policy(self, policy: Policy) -> ForedraftContender:
        """Return a copy of this contender, which drafts, that runs under another policy."""
        other = copy(self)
        other.name, other.policy, other.policy_name = f"{self.method}, {policy.name}", policy, policy.name
        return other

    def run(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Decode the prompts as one batch."""
        engine = self.llm.loaded.engine
        timer = DecodingTimer(engine)
        with replaced(engine, "policy", self.policy), observed(engine, timer):
            outputs = self.llm.generate(prompts, [self._params(ids, new_tokens) for ids in prompts])
        for output in outputs:
            if output.error is not None:
                raise RequestError(f"{self.name} failed: {output.error}")
        tokens = tuple(tuple(output.token_ids) for output in outputs)
        seconds = timer.ended - timer.began - timer.reading_since
        stats = Stats.merge((output.stats for output in outputs), seconds)
        return Timing(tokens, timer.reading, seconds, sum(map(len, tokens)), timer.rounds, stats)

    def _params(self, prompt: list[int], new_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            max_new_tokens=new_tokens,
            ignore_eos=True,
            drafter=self.drafter,
            seed=zlib.crc32(str(prompt).encode()) if self.acceptance == "coupled" else None,
            acceptance=self.acceptance,
        )


@dataclass(slots=True)
class LineUp:
    """The contenders of one benchmark."""

    spelling: Callable[[Option], str] = python_spelling  # of an option in a note
    contenders: list[Contender] = field(default_factory=list)  # in the table's order, plain decoding first
    loaded_bytes: dict[str, int] = field(default_factory=dict)  # that loading its program added
    notes: list[str] = field(default_factory=list)  # why methods are left out

    def load(
        self,
        context: BenchContext,
        methods: Sequence[str],
        memory: Memory,
        foredraft_bytes: int,
        *,
        required: Collection[str] = (),
        progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    ) -> None:
        """Load the programs and make the contenders; what cannot run is left out with a note."""
        programs: dict[str, tuple[Any, int]] = {"foredraft": (context.llm, foredraft_bytes)}
        failed: dict[str, ForedraftError] = {}  # programs that cannot run
        for done, name in enumerate(methods):
            progress("methods", done, len(methods))
            kind = CONTENDERS[name]
            try:
                if kind.program in failed:
                    raise failed[kind.program]
                if kind.program not in programs:
                    programs[kind.program] = _load_program(kind.program, context, memory)
                program, added = programs[kind.program]
                self.contenders.append(kind.make(program, context))
                self.loaded_bytes[name] = added
            except ForedraftError as error:
                if name in required:
                    raise
                if kind.program not in failed:
                    self.notes.append(f"left out: {error.describe(self.spelling)}")
                if kind.program not in programs:
                    failed[kind.program] = error
        progress("methods", len(methods), len(methods))

    def add_policies(self, context: BenchContext, policies: Sequence[str]) -> None:
        """Add a contender for each drafter and policy, right after the drafter's own contender."""
        before, self.contenders = self.contenders, []
        for contender in before:
            self.contenders.append(contender)
            if not isinstance(contender, ForedraftContender) or contender.policy_name is None:
                continue
            suitable = CONTENDERS[contender.method].policies
            for name in policies:
                if name in suitable and name != contender.policy_name:
                    other = contender.with_policy(context.policy_for(contender.drafter, name))
                    self.contenders.append(other)
                    self.loaded_bytes[other.name] = self.loaded_bytes[contender.name]
            if unsuitable := [name for name in policies if name not in suitable]:
                self.notes.append(f"left out: {contender.method} cannot follow {', '.join(unsuitable)}")
        if policies and not any(contender.policy_name in policies for contender in self.contenders):
            problem = "but none of the methods can follow it"
            raise ConfigError(problem, option="policies", value=",".join(policies), remedy="give others")

    def note_fixed_policies(self, policy: str | None) -> None:
        """Note each method that keeps its own policy although another one was asked for."""
        own = {one.method: one.policy_name for one in reversed(self.contenders)}
        differ = [(method, name) for method, name in own.items() if policy and name not in (None, policy)]
        self.notes += [f"{method} keeps to policy {name}" for method, name in differ]

    @property
    def versions(self) -> dict[str, str | None]:
        """The versions of the other programs that take part."""
        programs = {CONTENDERS[contender.method].program for contender in self.contenders}
        return {name: PROGRAMS[name].version for name in sorted(programs - {"foredraft"})}

    def drop(self, contender: Contender, reason: str) -> None:
        """Remove and close a contender whose run failed."""
        self.contenders.remove(contender)
        self.notes.append(f"left out: {contender.name} failed ({reason})")
        contender.close()

    def close(self) -> None:
        """Close all contenders."""
        for contender in self.contenders:
            contender.close()


def _load_program(name: str, context: BenchContext, memory: Memory) -> tuple[Any, int]:
    """Return a program's loaded models and the bytes that they added; every failure is a ConfigError."""
    program = PROGRAMS[name]
    if not program.installed:
        raise ConfigError(f"{name}: {program.package} is not installed", remedy=program.install)
    spec = context.target.spec
    need, free = weight_bytes(spec, context.device, context.dtype), free_memory(context.device)
    if need > free:  # of its own copy of the target's weights: the system may kill it
        raise ConfigError(
            f"{name} needs {need / 2**30:.3f} GiB for its own copy of the weights, but {free / 2**30:.3f} GiB"
            f" are free on {context.device}",
            remedy=("leave it out of ", Option("methods")),
        )
    before = memory.held_after_release()
    try:
        models = program.load(context)
    except ForedraftError:
        raise
    except Exception as error:  # other programs raise anything; the benchmark goes on without them
        raise ConfigError(f"{name} cannot load this model ({type(error).__name__}: {error})") from error
    return models, memory.held_after_release() - before
