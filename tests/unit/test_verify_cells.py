"""The cells of a sampled distribution: exact against brute force; and the target's logits by plain decoding."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.verify.chi_square import Branch, Cells, most_cells
from foredraft.verify.sampler import PlainTarget
from tests.support import distributions
from tests.support.checkpoints import save_checkpoint

VOCABULARY, PROMPT = 7, [1, 4, 3, 5]
WIDTHS = [(2, 1, 1), (3, 2), (1,), (2, 2, 2), (9, 9)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"repetition_penalty": 0.6, "presence_penalty": -2.0, "frequency_penalty": 0.7, "min_p": 0.02},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_checkpoint(tmp_path_factory.mktemp("tiny") / "big", vocab_size=VOCABULARY)
    return foredraft.load(folder, drafter="lookup", device="cpu", max_batch=2, max_length=300, policy="fixed")


@pytest.fixture
def plain(llm: LLM) -> PlainTarget:
    return PlainTarget(llm.loaded, 280)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_probabilities_are_the_sums_over_all_continuations(
    plain: PlainTarget, setting: dict[str, Any], widths: tuple[int, ...]
) -> None:
    params = SamplingParams(max_new_tokens=len(widths), ignore_eos=True, **setting)
    cells = Cells.of(plain.next_token(PROMPT, params), widths)
    wanted: Counter[int | None] = Counter()
    logits = lambda text: plain.logits(PROMPT, text[len(PROMPT) :]).tolist()  # noqa: E731
    whole = distributions.outputs(logits, PROMPT, params)
    for output, probability in whole.items():
        wanted[cells.of_sample(output)] += probability
    assert None not in wanted
    assert set(wanted) == set(range(len(cells.probabilities)))
    assert [wanted[i] for i in range(len(wanted))] == pytest.approx(cells.probabilities, rel=1e-5)
    assert sum(cells.probabilities) == pytest.approx(1, abs=1e-12)
    resting = {i for (_, rest), i in cells.index.items() if rest}
    for output in itertools.product(range(VOCABULARY), repeat=len(widths)):
        if output not in whole:  # tokens that follow a rest do not change the cell
            assert cells.of_sample(output) in {None, *resting}


def test_cells_separate_the_most_likely_tokens_from_the_rest() -> None:
    table = {(): [0.5, 0.2, 0.3], (0,): [0.0, 1.0, 0.0], (2,): [0.25, 0.5, 0.25]}
    cells = Cells.of(lambda prefix: torch.tensor(table[prefix], dtype=torch.float64), (2, 1))
    assert {key: cells.probabilities[i] for key, i in cells.index.items()} == pytest.approx(
        {((), True): 0.2, ((0, 1), False): 0.5, ((2,), True): 0.15, ((2, 1), False): 0.15}
    )
    assert cells.of_sample([1, 2]) == cells.index[(), True]
    assert cells.of_sample([2, 0]) == cells.of_sample([2, 2]) == cells.index[(2,), True]
    assert cells.of_sample([0, 0]) is None  # probability 0
    assert cells.entropy == pytest.approx(1.2376, abs=1e-4)


def test_the_next_tokens_after_a_prefix_are_the_separate_ones_and_the_rest() -> None:
    cells = Cells.of(lambda prefix: torch.tensor([0.5, 0.2, 0.3, 0.0], dtype=torch.float64), (2, 3))
    assert cells.next_probabilities(()) == pytest.approx([0.5, 0.3, 0.2])
    assert [cells.next_cell((), token) for token in range(4)] == [0, 2, 1, 2]
    assert cells.next_probabilities((2,)) == pytest.approx([0.5, 0.3, 0.2, 0.0])


def test_a_certain_distribution_is_one_cell(plain: PlainTarget) -> None:
    cells = Cells.of(plain.next_token(PROMPT, SamplingParams(top_k=1)), (2, 1, 1))
    assert cells.probabilities == [1.0]
    assert cells.entropy == 0


def test_logits_do_not_depend_on_earlier_calls(llm: LLM, plain: PlainTarget) -> None:
    texts = [[], [3], [3, 2], [5], [5, 2, 2], [3, 2], [], [6, 6, 6, 6]]
    long = [1, *[3, 4, 5] * 90]  # two chunks of prefill
    for prompt, new in [(PROMPT, n) for n in texts] + [([4], [2]), (long, [3]), (PROMPT, [3, 2]), (long, [])]:
        assert torch.equal(plain.logits(prompt, new), PlainTarget(llm.loaded, 280).logits(prompt, new))


@pytest.mark.parametrize("prompt", [PROMPT, [4], [1, *[3, 4, 5] * 90]], ids=len)
def test_the_argmax_is_plain_decodings_token(llm: LLM, plain: PlainTarget, prompt: list[int]) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=6, drafter="none", ignore_eos=True)
    [output] = llm.generate([prompt], params)
    for i, token in enumerate(output.token_ids):
        assert int(plain.logits(prompt, output.token_ids[:i]).argmax()) == token


def test_of_equally_likely_tokens_the_smallest_ids_are_separate() -> None:
    tied = torch.tensor([0.1, 0.2, 0.2, 0.2, 0.3, 0.0], dtype=torch.float64)
    branch = Branch.of(tied, 3)
    assert list(branch.separate) == [4, 1, 2]
    assert branch.rest == pytest.approx(0.3)
    assert branch.possible is not None and branch.possible.tolist() == [True] * 5 + [False]
    assert list(Branch.of(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64), 3).separate) == [1]


def test_cells_keep_no_table_of_the_vocabulary() -> None:
    """A vocabulary of today has 262,144 tokens, and a verification builds the cells of dozens of prompts."""
    size = 50_000
    spread = torch.full((size,), 1 / size, dtype=torch.float64)
    whole = Cells.of(lambda prefix: spread, (3, 2, 1, 1))
    held = sum(branch.possible.nbytes for branch in whole.branches.values() if branch.possible is not None)
    assert held == 0
    truncated = spread.index_fill(0, torch.arange(50, size), 0.0) * (size / 50)
    few = Cells.of(lambda prefix: truncated, (3, 2, 1, 1))
    assert all(each.possible is not None and each.possible.nbytes <= size for each in few.branches.values())
    assert few.of_sample([60, 0, 0, 0]) is None and whole.of_sample([60, 0, 0, 0]) is not None


@pytest.mark.parametrize("widths", [(2, 1, 1, 1), (3, 2), (1,)], ids=str)
def test_most_cells_is_the_number_of_cells_where_all_tokens_are_possible(widths: tuple[int, ...]) -> None:
    spread = torch.full((9,), 1 / 9, dtype=torch.float64)
    assert len(Cells.of(lambda prefix: spread, widths).probabilities) == most_cells(widths)
