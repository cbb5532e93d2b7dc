"""What lowers the acceptance of a draft model besides its weights: tokenizer, template, length."""

from __future__ import annotations

from pathlib import Path

from foredraft.errors import ForedraftError
from foredraft.llm.loaded import Loaded
from foredraft.model.chat import ChatTemplate
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer

__all__ = ["model_notes"]


def model_notes(loaded: Loaded, draft: ModelSpec, folder: Path) -> tuple[str, ...]:
    """Return one sentence for each mismatch of a draft model with the target.

    Args:
        loaded: The target.
        draft: The draft model.
        folder: The draft model's.
    """
    notes: list[str] = []
    if draft.max_positions < loaded.spec.max_positions:
        notes.append(
            f"the draft model was made for {draft.max_positions:,} positions and the target for"
            f" {loaded.spec.max_positions:,}: it drafts nothing beyond its own length"
        )
    try:
        tokenizer = Tokenizer.from_folder(folder, draft.vocab_size)
        template = ChatTemplate.from_folder(folder)
    except ForedraftError as error:
        return (*notes, f"the draft model's tokenizer cannot be read: {error}")
    target = loaded.tokenizer
    if target is None or tokenizer is None:
        return tuple(notes)
    own = target.chat
    if own is not None and template is None:
        notes.append(
            "the target has a chat template and the draft model has none: a base model drafts for a tuned"
            " target, which costs acceptance in conversations; give its tuned version"
        )
    elif own is not None and template is not None and own.templates != template.templates:
        notes.append(
            "the chat templates of target and draft model differ: the draft model was tuned on prompts of"
            " another form than the target's"
        )
    if not target.has_ids_of(tokenizer):
        notes.append(
            "the tokenizers give some tokens different ids, or one has tokens that the other lacks: those are"
            " never drafted"
        )
    return tuple(notes)
