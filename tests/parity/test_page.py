"""docs/models.md names what is tested: its table is made of `checkpoints.VARIANTS`, and nothing else.

Every cell stands for variants that `test_logits.py` compares with transformers. To renew the table after a
change of `VARIANTS`, put what the failing test prints between the page's two marks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from foredraft.model.families import FAMILIES as ARCHITECTURES
from tests.support.checkpoints import ABSENT, FAMILIES, VARIANTS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- the tested variants -->", "<!-- end of the tested variants -->"
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
# how models are drawn or fed, and what transformers writes but does not read
UNSAID = SIZES | {
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "_sliding_window_pattern",
}
PLAIN_ROPE = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}
LLAMA3 = {"low_freq_factor", "high_freq_factor"}


def said(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    if isinstance(value, list):
        return "listed"
    if isinstance(value, dict):
        return said_of_rope(value)
    return f"`{json.dumps(value)}`"


def said_of_rope(rope: dict[str, Any]) -> str:
    if "full_attention" in rope:
        return f"{said_of_rope(rope['full_attention'])} / {said_of_rope(rope['sliding_attention'])}"
    kind = str(rope.get("rope_type", rope.get("type")))
    more = sorted(rope.keys() - PLAIN_ROPE - LLAMA3)
    return f"{kind} with {', '.join(f'`{key}`' for key in more)}" if more else kind


def table() -> str:
    """One row a config key, one column a family, the tested values in the cells."""
    cells: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for family, keys in VARIANTS.values():
        base = FAMILIES[family][2]
        for key, value in {**base, **keys}.items():
            cell = cells[key][family]
            if key not in UNSAID | {"max_position_embeddings"} and said(value) not in cell:
                cell.append(said(value))
    lines = [
        f"| key | {' | '.join(FAMILIES[family][1].__name__ for family in FAMILIES)} |",
        "|---" * (len(FAMILIES) + 1) + "|",
    ]
    for key in sorted(cells):
        if any(cells[key].values()):
            row = ["; ".join(cells[key][family]) or "–" for family in FAMILIES]
            lines.append(f"| `{key}` | {' | '.join(row)} |")
    return "\n".join(lines)


def test_the_table_is_what_is_tested() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == table(), f"\n{table()}"


def test_every_family_has_its_paragraph_and_its_variants() -> None:
    text = PAGE.read_text(encoding="utf-8")
    tested = {FAMILIES[family][1].__name__ for family, _ in VARIANTS.values()}
    assert tested == set(ARCHITECTURES)
    for architecture, family in ARCHITECTURES.items():
        assert f"`{architecture}`" in text
        assert f"`{family.model_type}`" in text
