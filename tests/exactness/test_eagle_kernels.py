"""EAGLE heads by the C kernels: fused drafts are those of single steps, and planted defects of the C sources."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft.drafters.eagle3 import Eagle3
from foredraft.kernels.compilation import library
from tests.exactness.matrix import check_fused_drafts, prompts_of
from tests.parity.test_heads import V, check_parity, load
from tests.support.compiling import Defects
from tests.support.heads import FORMATS

pytestmark = pytest.mark.skipif(library() is None, reason="needs the C kernels")
EAGLES = [name for name, form in FORMATS.items() if form["of"] in ("eagle", "eagle3")]


def check_fused(format: str, dtype: str = "float32") -> None:
    """Check the drafts of texts, whose rows have read less and more than the pending token's pair."""
    unread, reads = Eagle3._unread, set[int]()

    def noted(self: Eagle3, *given: Any) -> Any:
        found = unread(self, *given)
        reads.update(map(len, found[0]))
        return found

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr(Eagle3, "_unread", noted)
        llm = load(Path(place), format, "kernels", dtype)
        check_fused_drafts(llm, FORMATS[format]["of"], prompts_of(4, V))
    assert len(reads) > 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", EAGLES)
def test_fused_drafts_are_those_of_single_steps(format: str, dtype: str) -> None:
    check_fused(format, dtype)


parity = functools.partial(functools.partial, check_parity)
fused = functools.partial(functools.partial, check_fused)
# name: what stands in the sources and what takes its place, and a check
DEFECTS: dict[str, tuple[str, str, Callable[[], None]]] = {
    "the state as embedding": ("(const E *)p->inputs + c * n, to", "x + c * n, to", parity("qwen3")),
    "the empty slot attended": ("seen &= key > 0;", "seen &= key >= 0;", parity("safeailab")),
    "the residual normed": ("m->residual && c <", "c <", parity("safeailab")),
    "the raw state recurs": ("if (m->recurs)", "if (0)", fused("qwen3")),
    "the state of an ended row": ("memmove(x + left * hidden", "memmove(x + g * hidden", fused("safeailab")),
    "draft tokens in their own order": ("full[draft_vocab[i]] =", "full[i] =", fused("safeailab")),
}


PLANTED = Defects(edit for *edit, _ in DEFECTS.values())


@pytest.mark.heavy
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *edit, check = DEFECTS[name]
    PLANTED.assert_caught(check, edit, monkeypatch)
