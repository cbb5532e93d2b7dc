"""Chi-square tests by draft position: tokens that came from one position of a draft, given the text before.

A position of a draft is reached if all drafted tokens before it were accepted, which is decided before the
position's own coin and draws. So under a lossless rule, every token that the position gives, accepted or
corrected, has the target's distribution given the text before it. The same holds for the bonus token after a
draft that was accepted whole.

The tokens of a position are counted by the text before them, as far as the cells separate it, and by separate
token or rest. Given the number n_s of tokens after a text s, Pearson's statistic of these counts is
approximately chi-square, and so is the sum over the texts. If the tokens after s have total variation
distance t_s from the target, the sum's noncentrality parameter is at least sum 4 n_s t_s^2 >= 4 n t^2 by
Jensen's inequality, where n = sum n_s, and t is the distance averaged over the tokens. A joint test dilutes
the same distance by all samples that do not reach the position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from foredraft.decode.round_trace import RoundTrace
from foredraft.verify.cells import Cells, Prefix
from foredraft.verify.chi_square import detectable_distance, pearson, survival
from foredraft.verify.verify_records import DraftPosition

__all__ = ["PositionCounts"]


class PositionCounts:
    """Tokens of samples by draft position, the bonus token last.

    Args:
        cells: Separate the texts before a token, and the tokens after a text.
        positions: Positions of the longest draft.
    """

    def __init__(self, cells: Cells, positions: int) -> None:
        self._cells = cells
        # Of each position: (text before, number of the next cell) -> tokens, and text before -> corrections.
        self._tokens: list[Counter[tuple[Prefix, int]]] = [Counter() for _ in range(positions + 1)]
        self._corrections: list[Counter[Prefix]] = [Counter() for _ in range(positions + 1)]

    @property
    def corrections(self) -> list[int]:
        """Corrections at each draft position; 0 for the bonus token."""
        return [counts.total() for counts in self._corrections]

    @property
    def bonuses(self) -> int:
        """Bonus tokens."""
        return self._tokens[-1].total()

    def add(self, tokens: list[int], trace: list[RoundTrace]) -> None:
        """Count a sample's tokens as far as the cells separate the text before them."""
        for each in trace:
            drafted = len(each.draft)
            for at in range(min(each.accepted + 1, each.emitted) if drafted else 0):
                prefix = tuple(tokens[: each.start + at])
                if prefix not in self._cells.branches:
                    return
                position = at if at < drafted else -1
                self._tokens[position][prefix, self._cells.next_cell(prefix, tokens[each.start + at])] += 1
                self._corrections[position][prefix] += at == each.accepted < drafted

    def tests(self, level: float, power: float) -> Iterator[DraftPosition]:
        """Yield the test of every position, each at this level.

        Texts after which the tokens are too few for more than one cell tell nothing and are left out.
        """
        for position, (tokens, corrections) in enumerate(zip(self._tokens, self._corrections, strict=True)):
            degrees = tested = corrected = 0
            statistic = 0.0
            for prefix in dict.fromkeys(prefix for prefix, _ in tokens):
                probabilities = self._cells.next_probabilities(prefix)
                counts = [tokens[prefix, cell] for cell in range(len(probabilities))]
                result = pearson(counts, probabilities, sum(counts))
                if result.cells > 1:
                    degrees += result.cells - 1
                    statistic += result.statistic
                    tested += sum(counts)
                    corrected += corrections[prefix]
            yield DraftPosition(
                position=position,
                bonus=position == len(self._tokens) - 1,
                tokens=tested,
                corrections=corrected,
                degrees=degrees,
                statistic=statistic,
                p_value=survival(statistic, degrees),
                level=level,
                detectable=detectable_distance(tested, degrees, level, power),
            )
