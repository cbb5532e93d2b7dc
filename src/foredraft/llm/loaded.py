"""Loaded: what loading makes of a model, as one record; and the policies that requests name beside the loaded
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Policy
from foredraft.errors import RequestError, did_you_mean
from foredraft.kinds.tables import POLICIES
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer
from foredraft.profiling.profile import use_profile


class RequestPolicies:
    """Each policy is made once, because some learn from all requests."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Policy] = {}

    def measure(self, engine: Engine) -> None:
        """Give the policies that decide by costs those of this machine, before a server is busy."""
        if engine.drafters:
            for name, kind in POLICIES.items():
                if kind.uses_costs:
                    use_profile(engine, policy=self.of(SamplingParams(policy=name), engine))

    def of(self, params: SamplingParams, engine: Engine) -> Policy | None:
        """Return the policy of a request; None is the engine's."""
        loaded = engine.policy
        name = params.policy or loaded.name
        if name != loaded.name and name not in POLICIES:
            raise RequestError(
                option="policy", value=name,
                remedy=f"give one of {', '.join(POLICIES)}{did_you_mean(name, POLICIES)}",
            )  # fmt: skip
        kind = loaded if name == loaded.name else POLICIES[name]
        most = engine.target.max_queries - 1
        own = min(kind.max_draft, most)
        if kind.uses_costs:  # it knows no costs of longer drafts; shorter ones are a bound on its decisions
            most = own
        longest = own if params.max_draft is None else params.max_draft
        if longest > most:
            raise RequestError(
                f"but drafts have {most} tokens at most here", option="max_draft", value=longest,
                remedy=f"give {most} or less",
            )  # fmt: skip
        if kind is loaded and (kind.uses_costs or longest == own):
            return None
        key = name, own if kind.uses_costs else longest
        made = self._made.get(key)
        if made is None:
            # Another length of the loaded policy keeps the settings that it was loaded with.
            same: Any = loaded
            new = replace(same, max_draft=key[1]) if kind is loaded else POLICIES[name].make(key[1])
            made = self._made.setdefault(key, new)  # one, whatever the thread
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A loaded model: the parts that decode, the limits, and what was chosen."""

    engine: Engine  # decodes; it has the policy, the drafters and the caches
    runner: Runner  # runs the target, for the engine and for programs that time or probe bare forwards
    spec: ModelSpec  # the target's
    tokenizer: Tokenizer | None  # the target's; None where its folder has none
    model: str  # the folder or hub id that was loaded; "demo" for the demo models
    weights: str | None  # how the target's weights are quantised, such as "int4"; None if they are not
    lora: tuple[str, ...] = ()  # the LoRAs that are merged into the target, in order
    max_length: int  # prompt and new tokens of one request together, at most
    default_drafter: str | None  # the drafter of requests that do not give one; None is plain decoding
    default_params: SamplingParams = field(default_factory=SamplingParams)  # from generation_config.json
    deterministic: bool = True  # whether the target's forwards keep to batch-invariant shapes
    profile_seconds: float = 0.0  # of measuring costs while loading; 0 where they were known
