"""The table of docs/models.md lists exactly the config values of `checkpoints.VARIANTS`.

After a change of `VARIANTS`, copy the table that the failing test prints between the two marks of the page."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from foredraft.model.families import FAMILIES as ARCHITECTURES
from foredraft.model.families import hybrid, mixers, muse
from foredraft.model.unsupported import ELSEWHERE, ELSEWHERE_IN_ROPE
from tests.parity.test_internlm2 import ARCHITECTURE as INTERNLM2
from tests.support import variants_hybrids, variants_norms
from tests.support.checkpoints import ABSENT, FAMILIES, VARIANTS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- the tested variants -->", "<!-- end of the tested variants -->"
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
# keys that are no variants: sizes, initialisation and special ids, and a key that transformers does not read
NOT_LISTED = (
    SIZES
    | variants_norms.SIZES
    | variants_hybrids.SIZES
    | {"initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "_sliding_window_pattern"}
)
PLAIN_ROPE = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}
LLAMA3 = {"low_freq_factor", "high_freq_factor"}


def shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    if isinstance(value, list):
        return "listed"
    if isinstance(value, dict):
        return shown_rope(value)
    return f"`{json.dumps(value)}`"


def shown_rope(rope: dict[str, Any]) -> str:
    if "full_attention" in rope:
        return f"{shown_rope(rope['full_attention'])} / {shown_rope(rope['sliding_attention'])}"
    kind = str(rope.get("rope_type", rope.get("type")))
    more = sorted(rope.keys() - PLAIN_ROPE - LLAMA3)
    return f"{kind} with {', '.join(f'`{key}`' for key in more)}" if more else kind


def table() -> str:
    cells: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for family, keys in VARIANTS.values():
        base = FAMILIES[family][2]
        for key, value in {**base, **keys}.items():
            cell = cells[key][family]
            if key not in NOT_LISTED | {"max_position_embeddings"} and shown(value) not in cell:
                cell.append(shown(value))
    lines = [
        f"| key | {' | '.join(FAMILIES[family][1].__name__ for family in FAMILIES)} |",
        "|---" * (len(FAMILIES) + 1) + "|",
    ]
    for key in sorted(cells):
        if any(cells[key].values()):
            row = ["; ".join(cells[key][family]) or "–" for family in FAMILIES]
            lines.append(f"| `{key}` | {' | '.join(row)} |")
    return "\n".join(lines)


def test_the_table_lists_the_tested_values() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == table(), f"\n{table()}"


def test_the_page_lists_the_keys_of_other_implementations() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("<!-- the keys of other implementations -->")[2]
    rows = text.partition("<!-- end of")[0].strip().splitlines()[2:]
    assert rows == [
        *(f"| `{key}` | {meaning} |" for key, (_, meaning) in ELSEWHERE.items()),
        *(
            f"| `{key}`, of rotary parameters | {meaning} |"
            for key, (_, meaning) in ELSEWHERE_IN_ROPE.items()
        ),
    ]


# which have tests of their own, in test_hybrids and test_muse_glimmer
OTHERS = {name for module in (hybrid, mixers, muse) for name in module.FAMILIES}


def test_every_family_is_documented_and_tested() -> None:
    text = PAGE.read_text(encoding="utf-8")
    tested = {FAMILIES[family][1].__name__ for family, _ in VARIANTS.values()} | {INTERNLM2} | OTHERS
    assert tested == set(ARCHITECTURES)
    for architecture, family in ARCHITECTURES.items():
        assert f"`{architecture}`" in text
        assert f"`{family.model_type}`" in text
