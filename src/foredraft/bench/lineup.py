"""The field: who takes part in a benchmark, loaded, and who does not, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.bench.contender import BenchContext, Contender
from foredraft.bench.contenders import CONTENDERS, PROGRAMS
from foredraft.bench.foredraft_contender import ForedraftContender
from foredraft.bench.machine import Memory
from foredraft.errors import ConfigError, ForedraftError
from foredraft.loading.memory import free_memory
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import weight_bytes

__all__ = ["LineUp"]


@dataclass(slots=True)
class LineUp:
    """contenders: in the table's order, plain first. loaded: bytes that loading each one's program added, by
    contender. notes: who was left out, and why."""

    contenders: list[Contender] = field(default_factory=list)
    loaded: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def enter(
        self,
        setting: BenchContext,
        names: Sequence[str],
        memory: Memory,
        ours: int,
        *,
        wanted: Collection[str] = (),
    ) -> None:
        """Load and make them. ours: bytes that loading our own model added. wanted: those that were asked for
        by name, of which one that cannot run is an error, a ConfigError, and no note."""
        programs: dict[str, tuple[Any, int]] = {"foredraft": (setting.llm, ours)}
        for name in names:
            kind = CONTENDERS[name]
            try:
                if kind.program not in programs:
                    programs[kind.program] = _loaded(kind.program, setting, memory)
                program, added = programs[kind.program]
                self.contenders.append(kind.make(program, setting))
                self.loaded[name] = added
            except ForedraftError as error:
                if name in wanted:
                    raise
                self.notes.append(f"left out: {error}")

    def under(self, setting: BenchContext, policies: Sequence[str]) -> None:
        """Have our drafters take part under these policies, too, each right after its own. Raises ConfigError
        where none can."""
        before, self.contenders = self.contenders, []
        for contender in before:
            self.contenders.append(contender)
            if not isinstance(contender, ForedraftContender) or contender.policy is None:
                continue
            can = CONTENDERS[contender.method].policies
            for name in policies:
                if name in can and name != contender.policy:
                    other = contender.under(setting.policy(contender.drafter, name))
                    self.contenders.append(other)
                    self.loaded[other.name] = self.loaded[contender.name]
            unfit = [name for name in policies if name not in can]
            if unfit:
                self.notes.append(f"left out: {contender.method} cannot follow {', '.join(unfit)}")
        if policies and not any(contender.policy in policies for contender in self.contenders):
            names = ",".join(policies)
            raise ConfigError(f"policies is {names!r}, but none of the methods can follow that; give others")

    def leave(self, contender: Contender, why: str) -> None:
        """It cannot run after all."""
        self.contenders.remove(contender)
        self.notes.append(f"left out: {contender.name} failed ({why})")
        contender.close()

    def close(self) -> None:
        for contender in self.contenders:
            contender.close()


def _loaded(name: str, setting: BenchContext, memory: Memory) -> tuple[Any, int]:
    """A program's models, and the bytes that they added. Raises ConfigError, whatever a peer raises."""
    program = PROGRAMS[name]
    if program.missing is not None:
        raise ConfigError(f"{name}: {program.missing}")
    _check_room(name, setting)
    return _grown(memory, lambda: _load(name, program.load, setting))


def _check_room(name: str, setting: BenchContext) -> None:
    """Every program has a copy of its own, and a process that takes more than there is gets killed. Only the
    target's is looked at: not every program has a draft."""
    spec = ModelSpec.from_folder(setting.target)
    need, free = weight_bytes(spec, setting.device, setting.dtype), free_memory(setting.device)
    if need > free:
        raise ConfigError(
            f"{name} needs {need / 2**30:.3f} GiB for its own copy of the weights, but {free / 2**30:.3f} GiB"
            f" are free on {setting.device}; leave it out of the methods"
        )


def _load(name: str, load: Callable[[BenchContext], Any], setting: BenchContext) -> Any:
    try:
        return load(setting)
    except ForedraftError:
        raise
    except Exception as error:  # of a program that is not ours: whatever it is, the others go on
        raise ConfigError(f"{name} cannot load this model ({type(error).__name__}: {error})") from error


def _grown(memory: Memory, load: Callable[[], Any]) -> tuple[Any, int]:
    """What `load` makes, and the bytes that it added for good."""
    before = memory.settled()
    made = load()
    return made, memory.settled() - before
