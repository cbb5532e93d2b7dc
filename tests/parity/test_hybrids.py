"""Hybrids: their logits equal those of transformers, by the kernels and by PyTorch's operators.

Its two forms, by chunks and by steps, differ from each other: in float32 by up to 1e-4 of these logits.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import foredraft
from foredraft import CheckpointError
from foredraft.model import checkpoint, recurrent
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from tests.parity.test_logits import Pair, close, prompt_logits
from tests.support.checkpoints import save_variant
from tests.support.hybrids import VARIANTS, rewrite, save_hybrid
from tests.support.mutation import Mutant, assert_caught, caught_by
from tests.support.mutations import around, instead

LENGTH = 300
PREFIX = "model.language_model."


def logits_of(runner: Runner, tokens: list[int]) -> Tensor:
    """Return the logits [T, V] by a chunk of prompt and passes of several widths."""
    cache, widths = runner.new_cache(2, len(tokens)), [1, 2, 5, 16]
    states = runner.prefill(cache, 1, tokens[:256], 0).hidden
    found, at = [runner.head(states)[0, :256]], 256
    while at < len(tokens):
        cache.lengths[1] = at
        part = tokens[at : at + widths[at % 4]]
        logits = runner.forward(cache, torch.tensor([part]), [at], first_row=1).logits
        assert logits is not None
        found.append(logits[0])
        at += len(part)
    return torch.cat(found)


@functools.cache
def saved(variant: str) -> tuple[Path, Tensor, list[int]]:
    folder = save_hybrid(Path(tempfile.mkdtemp()), variant)
    tokens = torch.randint(3, 320, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits[0]
    return folder, expected, tokens[0].tolist()


def check(variant: str = "two values a key", native: bool = True) -> None:
    folder, expected, tokens = saved(variant)
    runner = Runner(load_decoder(folder, native=native))
    assert runner.by_kernels == native
    torch.testing.assert_close(logits_of(runner, tokens), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, native: bool) -> None:
    check(variant, native)


def test_the_text_half_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """Decays and norms in float32 beside weights of 16 bits, heads for further tokens, and a vision tower."""
    save_hybrid(tmp_path, dtype="bfloat16")
    plain = logits_of(Runner(load_decoder(tmp_path, native=True)), [*range(3, 90)] * 4)

    def wrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        wide = {
            name: t.float()
            for name, t in tensors.items()
            if name.endswith(("A_log", "linear_attn.norm.weight"))
        }
        found = {name.replace("model.", PREFIX, 1): t for name, t in (tensors | wide).items()}
        return found | {"mtp.fc.weight": torch.ones(4, 4), "model.visual.patch.weight": torch.ones(4)}

    rewrite(tmp_path, wrapped)
    text = json.loads((tmp_path / "config.json").read_text())
    names = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    tokens = {"image_token_id": 90, "vision_start_token_id": 91, "vision_config": {"depth": 2}}
    said = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    rope = text["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    whole = names | tokens | {"text_config": text | said | {"rope_parameters": rope}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert torch.equal(logits_of(Runner(load_decoder(tmp_path, native=True)), [*range(3, 90)] * 4), plain)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False; only True"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3; it must be a multiple of"),
        ({"layer_types": ["linear_attention"] * 8}, "without any layer that attends"),
        ({"rope_parameters": {"rope_type": "default", "alpha": 2.0}}, "alpha"),
    ],
)
def test_what_is_no_such_model_is_refused(keys: dict[str, object], problem: str) -> None:
    config = json.loads((saved("two values a key")[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=problem):
        ModelSpec.from_hf(config | keys)


def test_memory_is_told_before_loading(tmp_path: Path) -> None:
    """Of each row: states in float32, and the log of the latest positions, beside keys and values."""
    folder, _, _ = saved("two values a key")
    llm = foredraft.load(folder, device="cpu", max_batch=1, max_length=64)
    cache = llm.loaded.engine.cache
    rows = cache.recurrent
    assert rows is not None
    held = cache.planes[0].nbytes + rows.bases.nbytes + rows.logs.nbytes
    assert cache.bytes_per_row(llm.loaded.spec, 64, torch.float32) == held
    llm.close()


def check_operators() -> None:
    check(native=False)


def check_next() -> None:
    """The rows of Qwen3-Next's weights lie key head by key head."""
    pair = Pair(save_variant(Path(tempfile.mkdtemp()), "qwen3_next-three-a-key"))
    assert close(prompt_logits(pair.runner, pair.tokens), pair.expected)


def test_rows_that_lie_by_key_heads() -> None:
    check_next()


def without_the_oldest(step: Any, sizes: Any, weights: Any, window: Tensor, state: Tensor) -> Any:
    return step(sizes, weights, torch.cat([window[:1] * 0, window[1:]]), state)


DEFECTS: dict[Callable[[], object], list[tuple[Any, ...]]] = {
    check_operators: [
        ("a window that is too short", recurrent._step, around(without_the_oldest)),
        ("keys of any length", recurrent._unit, lambda _: lambda x: x),
        ("no gate", recurrent._gated, around(lambda gated, weights, read, z: gated(weights, read, torch.ones_like(z)))),
        ("gates beside other heads", checkpoint.qkv_order, lambda _: lambda spec: None),
    ],
    check_next: [
        ("rows as they lie", checkpoint.delta_order, instead(lambda *given: None)),
        ("heads of values in turn", checkpoint.delta_order, around(lambda order, sizes, *of_key: torch.cat([part.view(sizes.key_heads, -1, len(part) // sizes.value_heads).transpose(0, 1).flatten() if at >= len(of_key) - 2 else part for at, part in enumerate(order(sizes, *of_key).split([sizes.key_heads * rows for rows in of_key]))]))),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", caught_by(DEFECTS), ids=lambda mutant: str(mutant.name))
def test_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
