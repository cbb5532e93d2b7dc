"""Loaded: what loading makes of a model, as one record.

`LLM` wraps it. The commands that measure, search, verify or serve a model read its parts here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer

__all__ = ["Loaded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A loaded model: the parts that decode, the limits, and what was chosen.

    Attributes:
        engine: Decodes; it has the policy, the drafters and the caches.
        runner: Runs the target, for the engine and for programs that time or probe bare forwards.
        spec: The target's.
        tokenizer: The target's; None where its folder has none.
        model: The folder or hub id that was loaded; "demo" for the demo models.
        weights: How the target's weights are quantised, such as "int4"; None if they are not.
        lora: The LoRAs that are merged into the target, in order.
        max_length: Prompt and new tokens of one request together, at most.
        default_drafter: The drafter of requests that do not give one; None is plain decoding.
        default_params: The parameters of requests without their own, from generation_config.json.
        deterministic: Whether the target's forwards keep to batch-invariant shapes.
        profile_seconds: What measuring the costs of this machine took while loading; 0 where they were known.
    """

    engine: Engine
    runner: Runner
    spec: ModelSpec
    tokenizer: Tokenizer | None
    model: str
    weights: str | None
    lora: tuple[str, ...] = ()
    max_length: int
    default_drafter: str | None
    default_params: SamplingParams = field(default_factory=SamplingParams)
    deterministic: bool = True
    profile_seconds: float = 0.0
