"""The draft loop (`drafting`) in one call of the drafter's: the same draws by the same noise.

It serves where nobody has to look at a token before the next is drawn."""

from __future__ import annotations

import torch

from foredraft.decode.distribution import Distribution
from foredraft.decode.draft import Draft, Looper, RoundInputs, lengths_of
from foredraft.decode.noise import DRAFT, Noise
from foredraft.decode.policy import Policy
from foredraft.model.device import upload
from foredraft.model.runner import StopThresholds

__all__ = ["at_once"]


def at_once(
    drafter: Looper,
    behind: list[list[int]],
    starts: list[int],
    most: list[int],
    inputs: RoundInputs,
    policy: Policy,
    stops: StopThresholds | None,
    noise: Noise,
    greedy: bool,
) -> Draft | None:
    """A draft as the loop would make it; behind, starts, most: as `Looper.draft` has them. None where its
    steps have to be taken one by one."""
    table = inputs.table
    if policy.looks or inputs.penalty_context is not None or not table.plain:
        return None
    if any(s.constraint is not None for s, count in zip(inputs.sequences, most, strict=True) if count):
        return None
    sampling_inputs = None
    if not (greedy or table.all_greedy):
        if not noise.uses_gumbel_argmax:
            return None
        sampling_inputs = table.sampling_inputs(inputs.noise.bits(DRAFT)[:, : max(most)])
        if sampling_inputs is None:
            return None
    drafted = drafter.draft(behind, starts, most, sampling_inputs, stops)
    if drafted is None:
        return None
    finite, counts = drafted.finite.tolist(), drafted.counts
    lengths = [[*own[:count], False].index(False) for own, count in zip(finite, counts, strict=True)]
    drafter_nonfinite, width, several = None, max(lengths), lengths_of(tuple(lengths), inputs.device)
    tokens = drafted.tokens[:, :width]
    if lengths != counts:
        columns = torch.arange(width)
        tokens = tokens.where(columns < several[:, None], 0)
        drafter_nonfinite = upload(
            [length < count for length, count in zip(lengths, counts, strict=True)], inputs.device
        )
    q = Distribution(ids=tokens) if drafted.probs is None else Distribution(drafted.probs[:, :width])
    return Draft(tokens, several, q, drafter.resume(), drafter_nonfinite, drafted.sure, lengths)
