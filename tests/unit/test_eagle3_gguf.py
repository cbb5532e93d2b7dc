"""GGUF files of EAGLE-3 heads: what is read in them, and what is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foredraft
from foredraft.drafters.heads.eagle3_gguf import is_eagle3_gguf, read_head
from foredraft.drafters.heads.settings import HeadSettings, read_settings, write_settings
from tests.parity.test_heads import KEYS, V
from tests.support.checkpoints import reference_model
from tests.support.eagle3_gguf import TAPS, save_gguf_head
from tests.support.gguf_files import write_gguf
from tests.support.loaded import engine_of
from tests.support.refused_heads import check_refused

Arrays = dict[str, np.ndarray]


def edited(**arrays: np.ndarray | None) -> Callable[[Arrays], None]:
    """Return an edit of tensors; "_" stands for "." in their names, None drops one."""

    def edit(tensors: Arrays) -> None:
        for name, values in arrays.items():
            own = name.replace("__", ".")
            tensors.pop(own, None)
            if values is not None:
                tensors[own] = values

    return edit


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": ({"keys": {"target_hidden_size": 32}}, "fc.weight has shape [64, 192], but"),
    "taps beyond": ({"keys": {"target_layers": [2, 3, 9]}}, "reads the target after layer 9, but"),
    "no taps": ({"keys": {"target_layers": None}}, "target_layers"),
    "an unknown key": ({"keys": {"mystery": 1}}, "mystery = 1 is not known"),
    "a lying count of words": ({"keys": {"draft_vocab_size": 5}}, "draft_vocab_size is 5"),
    "words beyond": ({"tensors": edited(d2t=np.arange(8, 14))}, "d2t does not give 6 different token ids below 11"),
    "an unknown tensor": ({"tensors": edited(extra__weight=np.ones(2, np.float32))}, "extra.weight is not part of"),
    "a missing tensor": ({"tensors": edited(fc__weight=None)}, "lacks tensor fc.weight"),
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    reference_model(**KEYS).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_line(target: Path, tmp_path: Path, name: str) -> None:
    given, message = BAD[name]
    file = save_gguf_head(tmp_path / "head.gguf", "gguf", V, **given)
    check_refused(target, file, message, "eagle3")


def test_a_head_is_told_from_a_model(target: Path, tmp_path: Path) -> None:
    file = save_gguf_head(
        tmp_path / "head.gguf", "gguf", V, keys={"target_layers": None, "extract_layers": TAPS}
    )
    assert is_eagle3_gguf(file) and read_head(file).record.taps == tuple(TAPS)
    assert not is_eagle3_gguf(write_gguf(target, tmp_path / "model.gguf")) and not is_eagle3_gguf(target)
    options: dict[str, Any] = {
        "draft": file,
        "policy": "fixed",
        "device": "cpu",
        "max_batch": 1,
        "max_length": 64,
    }
    llm = foredraft.load(target, **options)
    assert llm.default_drafter == "eagle3" and engine_of(llm).drafters["eagle3"].taps == tuple(TAPS)
    write_settings(file, HeadSettings(tap_shift=1))
    other = save_gguf_head(tmp_path / "other.gguf", "gguf", V)
    assert read_settings(other) == HeadSettings()
    assert engine_of(foredraft.load(target, **options)).drafters["eagle3"].taps == tuple(t + 1 for t in TAPS)


def test_an_older_map_tells_what_it_holds(tmp_path: Path) -> None:
    ids = np.array([0, 2, 3, 4, 8, 9], np.int64)
    for name, values in (("ids", ids), ("offsets", ids - np.arange(6))):
        edit = edited(d2t=None, d2t__weight=values)
        record = read_head(save_gguf_head(tmp_path / f"{name}.gguf", "gguf", V, tensors=edit)).record
        assert record.absolute_words is None and record.words == 6
