"""Logits of a GGUF file equal those of transformers, which reads the same file by itself (float32).

transformers does not read every key: it takes the head size of Qwen 3, and Gemma's attention scale and
soft-caps, from its own defaults. The models of these tests have those.

Seen to fail on: the rows of q and k left as the file has them, Gemma's norms keeping their one, low and high
halves of the codes exchanged, each block scaled as its neighbour.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import is_gguf_available

from foredraft.model.hub import resolve
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from tests.parity.test_logits import close, prompt_logits
from tests.support.checkpoints import save_checkpoint

pytest.importorskip("gguf")
if not is_gguf_available():
    pytest.skip("transformers needs a newer gguf", allow_module_level=True)

from tests.support.gguf_files import KINDS, write_gguf

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}  # rows of whole blocks
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256},
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("kind", ["F32", *KINDS])
def test_logits_of_a_file_equal_those_of_transformers(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    folder = save_checkpoint(tmp_path / "model", family, **WIDE, **MODELS[family])
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, attn_implementation="eager", dtype=torch.float32
    ).eval()
    tokens = torch.randint(3, 97, (1, 100), generator=torch.Generator().manual_seed(7))  # [1, T]
    with torch.inference_mode():
        expected = reference(tokens).logits[0]
    runner = Runner(load_decoder(resolve(file), dtype=torch.float32))
    assert close(prompt_logits(runner, tokens), expected)
