"""Logits of a GGUF file equal those of the checkpoint that it was made of, of further families (float32).

Where transformers reads the architecture, and reads all of its keys, its logits are those of the file, too.

Seen to fail on: the heads of GPT-NeoX's queries, keys and values left as the file has them; the names of GLM-4's
norms exchanged; the pattern of Cohere 2's windows shifted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.model.gguf import gguf_config, names, norms_config
from foredraft.model.hub import resolve
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from tests.parity.test_logits import close, prompt_logits
from tests.support.checkpoints import save_variant
from tests.support.planting import Mutant, assert_caught, defect

pytest.importorskip("gguf")

from tests.support.gguf_norms import ARCHITECTURES, write_gguf

VARIANTS = [
    "cohere2",
    "exaone4",
    "exaone4-no-window",
    "glm4",
    "glm4-no-biases-tied",
    "gpt2",
    "gpt_neox",
    "gpt_neox-sequential-tied",
    "olmo2",
    "olmo3",
    "olmo3-one-base",
    "phi",
    "stablelm",
    "stablelm-parallel",
    "starcoder2-no-window",
]
TOKENS = torch.randint(3, 97, (1, 100), generator=torch.Generator().manual_seed(7))  # [1, T]


def check(variant: str, folder: Path, kind: str = "F32") -> None:
    """Check the logits of a file against those of the folder, by PyTorch's operators and by the kernels."""
    model = save_variant(folder / "model", variant)
    file = write_gguf(model, folder / "model.gguf", kind)
    want = prompt_logits(Runner(load_decoder(model)), TOKENS)
    for native in (False, True):
        decoder = load_decoder(resolve(file), dtype=torch.float32, native=native)
        assert close(prompt_logits(Runner(decoder), TOKENS), want)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_a_file_equal_those_of_the_checkpoint(variant: str, tmp_path: Path) -> None:
    check(variant, tmp_path)


def test_every_family_of_the_table_has_a_file() -> None:
    assert {variant.split("-")[0] for variant in VARIANTS} == ARCHITECTURES.keys()
    assert set(ARCHITECTURES.values()) <= gguf_config.ARCHITECTURES.keys()


@pytest.mark.parametrize("family", ["cohere2", "glm4", "gpt_neox"])
def test_coded_weights_of_a_file_are_those_that_it_stands_for(family: str, tmp_path: Path) -> None:
    """Rows in another order, and a tied head, in codes of 8 bits."""
    model = save_variant(tmp_path / "model", family)
    file = write_gguf(model, tmp_path / "model.gguf", "Q8_0")
    coded, plain = (
        prompt_logits(Runner(load_decoder(resolve(file), dtype=torch.float32, native=native)), TOKENS)
        for native in (True, False)
    )
    assert close(coded, plain)


MUTANTS = [
    ("gpt_neox", names.row_order, lambda sound: lambda architecture, *rest: None),
    ("cohere2", norms_config.cohere2, lambda sound: lambda read, sizes: shifted(sound(read, sizes))),
    ("stablelm", norms_config._partial, lambda sound: lambda read, sizes: whole(sound(read, sizes))),
]


def shifted(config: dict[str, object]) -> dict[str, object]:
    kinds = config["layer_types"]
    assert isinstance(kinds, list)
    return config | {"layer_types": [*kinds[1:], kinds[0]]}


def whole(rope: dict[str, object]) -> dict[str, object]:
    return rope | {"partial_rotary_factor": 1.0}


@pytest.mark.parametrize(
    ("variant", "seam", "spoiler"), MUTANTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_defect_is_caught(
    variant: str, seam: object, spoiler: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seam is norms_config.cohere2:
        name, model_type, _ = gguf_config.ARCHITECTURES["cohere2"]
        made = name, model_type, spoiler(seam)  # type: ignore[operator]
        monkeypatch.setitem(gguf_config.ARCHITECTURES, "cohere2", made)
        with pytest.raises(AssertionError):
            check(variant, tmp_path)
        return
    mutant: Mutant = defect(variant, seam, spoiler, lambda: check(variant, tmp_path))  # type: ignore[arg-type]
    assert_caught(mutant, monkeypatch)
