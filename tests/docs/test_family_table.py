"""The tables of public checkpoints and of refused kinds in docs/models.md are those that the tool makes."""

from __future__ import annotations

import pytest

from foredraft.model.families import FAMILIES
from foredraft.model.unsupported import KNOWN
from foredraft.model.weights import parameter_count
from recipes.family_table import CHECKPOINTS, EXAMPLES, PAGE, UNKNOWN, brought_up_to_date, spec_of


def test_the_tables_are_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("<!-- table: ") == 2
    assert brought_up_to_date(text) == text, "run python -m recipes.family_table"


def test_what_is_shown_as_refused_is_refused_for_its_kind() -> None:
    for kind, names in EXAMPLES.items():
        assert {KNOWN[name][0] for name in names.split()} == {kind}


def test_every_family_has_a_public_checkpoint() -> None:
    assert CHECKPOINTS.keys() == FAMILIES.keys() - UNKNOWN


@pytest.mark.parametrize("architecture", CHECKPOINTS)
def test_the_parameters_are_those_that_the_makers_state(architecture: str) -> None:
    """OPT 350M has more here: its embedding and head are folded with their projections."""
    for checkpoint in CHECKPOINTS[architecture]:
        spec = spec_of(architecture, checkpoint)
        folded = 2 * spec.vocab_size * spec.hidden_size - spec.vocab_size * 512 - 2 * 512 * spec.hidden_size
        count = parameter_count(spec) - (folded if "word_embed_proj_dim" in checkpoint.config else 0)
        assert count / 1e9 == pytest.approx(checkpoint.billions, rel=0.015), checkpoint.name
