"""About: the descriptions of the server and of its model."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from foredraft.kinds import DRAFTERS, POLICIES, PREDICTION
from foredraft.serve.state import Model

__all__ = ["Capabilities", "Health", "ModelCard", "ModelList", "Version", "capabilities", "card"]


class Health(TypedDict, closed=True):
    status: Literal["ok"]


class Version(TypedDict, closed=True):
    version: str


class ModelCard(TypedDict, closed=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict, closed=True):
    object: Literal["list"]
    data: list[ModelCard]


class DrafterTraits(TypedDict, closed=True):
    lossless: bool


class Capabilities(TypedDict, closed=True):
    """What the model and the server can do."""

    model: str
    max_model_len: int
    max_batch: int
    deterministic: bool
    weights: str | None
    lora: list[str]
    drafters: dict[str, DrafterTraits]
    default_drafter: str | None
    policy: str
    policies: list[str]
    chat: bool
    tools: bool
    prediction: bool
    constraints: list[str]
    streams: list[str]


def card(model: Model, name: str) -> ModelCard:
    """Return the card of the model, under a name that it has."""
    return {
        "id": name, "object": "model", "created": 0, "owned_by": "foredraft",
        "max_model_len": model.llm.max_length,
    }  # fmt: skip


def capabilities(model: Model) -> Capabilities:
    """Return what a model can do."""
    llm = model.llm
    return {
        "model": model.names[0], "max_model_len": llm.max_length, "max_batch": model.rows,
        "deterministic": llm.deterministic, "weights": llm.weights, "lora": [*llm.lora],
        "drafters": {name: {"lossless": DRAFTERS[name].lossless} for name in model.drafters},
        "default_drafter": llm.default_drafter,
        "policy": llm.loaded.engine.policy.name, "policies": list(POLICIES),
        "chat": model.chats, "tools": model.chats, "prediction": PREDICTION in model.drafters,
        "constraints": ["ban", "regex", "json_schema", "json_object", "grammar"] if llm.tokenizer else [],
        "streams": ["sse", "text", "websocket"],
    }  # fmt: skip
