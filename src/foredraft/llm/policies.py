"""Policies that requests name beside the loaded one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Policy
from foredraft.errors import RequestError, did_you_mean
from foredraft.kinds.tables import POLICIES
from foredraft.profiling.profile import use_profile

__all__ = ["RequestPolicies"]


class RequestPolicies:
    """Each policy is made once, because some learn from all requests."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Policy] = {}

    def measure(self, engine: Engine) -> None:
        """Give the policies that decide by costs those of this machine.

        Else that has to wait until a request names one while no other runs, which may never be on a server.

        Args:
            engine: No sequence has a row.
        """
        if engine.drafters:
            for name, kind in POLICIES.items():
                if kind.uses_costs:
                    use_profile(engine, policy=self.of(SamplingParams(policy=name), engine))

    def of(self, params: SamplingParams, engine: Engine) -> Policy | None:
        """Return the policy of a request; None is the engine's.

        Raises:
            RequestError: There is no such policy, or its drafts cannot be as long as `max_draft`.
        """
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
