"""Pieces: what a sequence has to show since the last look."""

from __future__ import annotations

from collections.abc import Callable

from foredraft.decode.sequence import Sequence, State
from foredraft.llm.output import Output, Piece

__all__ = ["Pieces"]


class Pieces:
    """Cuts one sequence into pieces; only between two steps of its engine.

    Args:
        sequence: The sequence.
        output: Makes the output of a sequence that has finished.
    """

    def __init__(self, sequence: Sequence, output: Callable[[Sequence], Output]) -> None:
        self.sequence, self._output = sequence, output
        self.over = False  # the last piece was given
        self._begun = False  # the first piece was given
        self._shown = 0  # new tokens that earlier pieces carried
        self._told = 0  # rounds that they carried

    def next(self) -> Piece | None:
        """Return a piece with the tokens since the last one; None where there are none."""
        sequence = self.sequence
        if self.over:
            return None
        settled = sequence.settled
        output = self._output(sequence) if sequence.state is State.FINISHED else None
        if output is None and settled <= self._shown:
            return None
        new, self._shown = slice(self._shown, settled), settled
        scores_prompt = sequence.params.prompt_logprobs is not None and not self._begun
        self._begun = True
        trace, self._told = sequence.trace[self._told :], len(sequence.trace)
        parts = None
        if sequence.text_buffer is not None:
            sequence.update_text()
            parts = sequence.text_buffer.release(settled)
        piece = Piece(
            text=None if parts is None else "".join(text for _, text in parts),
            token_ids=sequence.new_ids[new],
            origins=[str(origin) for origin in sequence.origins[new]],
            parts=parts,
            logprobs=None if sequence.params.logprobs is None else sequence.scores[new],
            prompt_logprobs=list(sequence.prompt_scores) if scores_prompt else None,
            trace=trace if sequence.traced else None,
            output=output,
        )
        self.over = output is not None
        return piece
