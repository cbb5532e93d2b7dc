"""The words of a reduced head: the target's ids that it can draft.

In safetensors files of EAGLE-3 `d2t` holds offsets: word i is the target's id i + d2t[i]. `t2d` marks the ids
that have a word. A file whose `t2d` agrees with `d2t` only where `d2t` holds ids themselves is read so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.drafters.vocabulary_map import VocabularyMap
from foredraft.errors import CheckpointError
from foredraft.model.decoder import Decoder

__all__ = ["draft_words", "map_of"]

REMEDY = "take both maps from one head"


def draft_words(
    where: str,
    count: int,
    vocabulary: int,
    d2t: Tensor | None,
    t2d: Tensor | None,
    *,
    name: str = "d2t",
    absolute: bool | None = False,
) -> Tensor | None:
    """Return the target's id of every word, [count] int64; None where word i is id i.

    Args:
        where: The head, for messages.
        count: Of its words.
        vocabulary: Size of the target's vocabulary.
        d2t: The offset of each word, [count]; None where there is none.
        t2d: Whether each id of the target has a word, [vocabulary]; None where there is none.
        name: Of the first map, for messages.
        absolute: It holds ids instead of offsets; None: ids if they can be, since offsets repeat.

    Raises:
        CheckpointError: The maps name ids that the target lacks, or one twice, or contradict each other.

    Examples:
        >>> draft_words("a head", 3, 8, torch.tensor([0, 1, 4]), None).tolist()
        [0, 2, 6]
    """
    if d2t is None:
        return None
    places = torch.arange(count)
    ids, offsets = d2t.cpu(), places + d2t.cpu()
    readings = {True: [ids], None: [ids, offsets], False: [offsets] if t2d is None else [offsets, ids]}[
        absolute
    ]
    sound = [each for each in readings if _is_sound(each, vocabulary)]
    if not sound:
        raise CheckpointError(
            f"{where}: {name} does not give {count} different token ids below {vocabulary}", remedy=REMEDY
        )
    if t2d is not None:
        marked = t2d.cpu().nonzero().flatten()
        sound = [each for each in sound if torch.equal(each.sort().values, marked)]
        if not sound:
            raise CheckpointError(f"{where}: {name} and t2d name different token ids", remedy=REMEDY)
    if count == vocabulary and torch.equal(sound[0], places):
        return None
    return sound[0].to(d2t.device)


def _is_sound(ids: Tensor, vocabulary: int) -> bool:
    within = bool((ids >= 0).all()) and bool((ids < vocabulary).all())
    return within and len(set(ids.tolist())) == len(ids)


def map_of(words: Tensor | None, target: Decoder) -> VocabularyMap | None:
    """Return the map from a head's logits to the target's ids; None where word i is id i."""
    if words is None:
        return None
    return VocabularyMap.of_words(words.tolist(), target.spec.vocab_size, target.device)
