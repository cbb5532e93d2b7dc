"""The line-up of a benchmark: the contenders that take part, loaded, and the reasons for those left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.bench.contender import BenchContext, Contender
from foredraft.bench.contenders import CONTENDERS, PROGRAMS
from foredraft.bench.foredraft_contender import ForedraftContender
from foredraft.bench.machine_record import Memory
from foredraft.errors import ConfigError, ForedraftError, Option, python_spelling
from foredraft.loading.free_memory import free_memory
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import weight_bytes

__all__ = ["LineUp"]


@dataclass(slots=True)
class LineUp:
    """The contenders of one benchmark.

    Attributes:
        spelling: How a note spells an option; by default as the Python API does.
        contenders: In the table's order, plain decoding first.
        loaded_bytes: Memory that loading each contender's program added, by contender's name.
        notes: One line for each method that is left out, with the reason.
    """

    spelling: Callable[[Option], str] = python_spelling
    contenders: list[Contender] = field(default_factory=list)
    loaded_bytes: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

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
        """Load the programs and make the contenders of these methods.

        A method that cannot run is left out with a note; the methods of a program that cannot, with one.

        Args:
            context: The settings that all contenders share.
            methods: Names from the table of contenders.
            memory: Measures the memory that loading adds.
            foredraft_bytes: Memory that loading Foredraft's own models added.
            required: Methods that the user named.
            progress: Called with (stage, done, total).

        Raises:
            ConfigError: A required method cannot run.
        """
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
        """Add a contender for each drafter and policy, right after the drafter's own contender.

        Raises:
            ConfigError: No contender can follow any of the policies.
        """
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
            raise ConfigError(
                "but none of the methods can follow it",
                option="policies",
                value=",".join(policies),
                remedy="give others",
            )

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
    _check_memory(name, context)
    before = memory.held_after_release()
    try:
        models = program.load(context)
    except ForedraftError:
        raise
    except Exception as error:  # other programs raise anything; the benchmark goes on without them
        raise ConfigError(f"{name} cannot load this model ({type(error).__name__}: {error})") from error
    return models, memory.held_after_release() - before


def _check_memory(name: str, context: BenchContext) -> None:
    """Refuse a program whose own copy of the target's weights does not fit into memory.

    The system may kill a process that runs out of memory. The draft model is not counted, because not every
    program loads one.
    """
    spec = ModelSpec.from_folder(context.target)
    need, free = weight_bytes(spec, context.device, context.dtype), free_memory(context.device)
    if need > free:
        raise ConfigError(
            f"{name} needs {need / 2**30:.3f} GiB for its own copy of the weights, but {free / 2**30:.3f} GiB"
            f" are free on {context.device}",
            remedy=("leave it out of ", Option("methods")),
        )
